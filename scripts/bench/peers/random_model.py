#!/usr/bin/env python3
"""Write a GGUF file of random blocks in the shape of Llama-3.2-1B, for speed alone: its texts are noise.

    .venv/bin/python scripts/bench/peers/random_model.py FILE.gguf [--mix Q4_K_M] [--seed 1] [--layers 16]

A mix is a type, or one of llama.cpp's mixtures: Q4_K_M has ffn_down and attn_v of some layers, and the embedding, in
Q6_K; Q5_K_M likewise. The vocabulary is the packaged model's, filled up with tokens that no text has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from decoder.model import packaged_gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 2048, 32, 8, 64, 8192, 128_256
HALVES = {  # offset and size of each float16 scale in a block, for weights of about 0.02
    "Q4_0": {0: 4.3e-3},
    "Q4_1": {0: 4.3e-3, 2: -3.2e-2},
    "Q5_0": {0: 2.2e-3},
    "Q5_1": {0: 2.2e-3, 2: -3.4e-2},
    "Q8_0": {0: 2.7e-4},
    "Q4_K": {0: 8e-5, 2: 6e-4},
    "Q5_K": {0: 4e-5, 2: 6.2e-4},
    "Q6_K": {208: 1.5e-5},
    "Q3_K": {108: 3.3e-4},
    "IQ4_XS": {0: 1.6e-5},
}
MIXES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}
"""Usual type, and the type of the tensors that get more bits."""


def has_more_bits(layer: int, layers: int) -> bool:
    """Return whether llama.cpp's mixtures give this layer's ffn_down and attn_v more bits."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def blocks(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    count = shape[0] * shape[1] // block_values
    found = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for at, size in HALVES[kind].items():
        found[:, at : at + 2] = (rng.uniform(0.7, 1.3, count) * size).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return found.reshape(shape[0], -1)


def matrices(layers: int, usual: str, more: str) -> list[tuple[str, str, tuple[int, int]]]:
    """Return name, type and shape of each matrix."""
    found = [("token_embd.weight", more, (VOCAB, HIDDEN))]
    for layer in range(layers):
        some = more if has_more_bits(layer, layers) else usual
        found += [
            (f"blk.{layer}.{name}.weight", kind, shape)
            for name, kind, shape in (
                ("attn_q", usual, (HEADS * HEAD_DIM, HIDDEN)),
                ("attn_k", usual, (KV_HEADS * HEAD_DIM, HIDDEN)),
                ("attn_v", some, (KV_HEADS * HEAD_DIM, HIDDEN)),
                ("attn_output", usual, (HIDDEN, HEADS * HEAD_DIM)),
                ("ffn_gate", usual, (FFN, HIDDEN)),
                ("ffn_up", usual, (FFN, HIDDEN)),
                ("ffn_down", some, (HIDDEN, FFN)),
            )
        ]
    return found


def vocabulary(writer: GGUFWriter) -> None:
    fields = GGUFReader(packaged_gguf()).fields
    for name, field in fields.items():
        if not name.startswith("tokenizer.") or name in {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}:
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    unused = [f"<|unused_{number}|>" for number in range(VOCAB - len(tokens))]
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([*types, *[3] * len(unused)])


def write(path: Path, mix: str, seed: int, layers: int) -> None:
    rng, writer = np.random.default_rng(seed), GGUFWriter(path, "llama")
    writer.add_name(f"random-1b-{mix}")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    vocabulary(writer)
    for name, kind, shape in matrices(layers, *MIXES.get(mix, (mix, mix))):
        writer.add_tensor(name, blocks(kind, shape, rng), raw_dtype=GGMLQuantizationType[kind])
    norms = [f"blk.{layer}.{name}_norm.weight" for layer in range(layers) for name in ("attn", "ffn")]
    for name in [*norms, "output_norm.weight"]:
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--mix", default="Q4_K_M", choices=[*HALVES, *MIXES])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    write(options.path, options.mix, options.seed, options.layers)


if __name__ == "__main__":
    main()
