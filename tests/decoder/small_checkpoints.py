"""Small checkpoints of both kinds, written by the libraries that others write theirs with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from decoder.batch import Chunk, StepBatch
from decoder.checkpoints.llama import EMBED, FINAL_NORM, HEAD, layer_name
from decoder.checkpoints.weights import Weights
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model
from decoder.text.codecs import BYTE_ALPHABET
from decoder.tiny import random_weights, tiny_config

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2", "Ġ 1", "Ġ Ġ"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small_vocabulary() -> list[str]:
    """Return special tokens, the 256 bytes, and the products of a few merges."""
    return [*SPECIALS, *BYTE_ALPHABET.values(), *(merge.replace(" ", "") for merge in MERGES)]


VOCAB_SIZE = len(small_vocabulary())
CONFIG = tiny_config(vocab_size=VOCAB_SIZE, tie_embeddings=False)


def small_library() -> Tokenizer:
    """The small vocabulary as a tokenizer.json would have it."""
    vocabulary = {token: i for i, token in enumerate(small_vocabulary())}
    library = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in MERGES]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return library


def interleave(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in llama.cpp's order, as its converter writes Q and K."""
    halves = matrix.reshape(num_heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


GGUF_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_ffn_norm": "post_ffw_norm.weight",
}


def gguf_tensors(
    config: Any = CONFIG, weights: Weights | None = None, architecture: str = "llama"
) -> dict[str, np.ndarray]:
    weights = random_weights(config) if weights is None else weights
    tensors = {"token_embd.weight": weights.read(EMBED), "output_norm.weight": weights.read(FINAL_NORM)}
    if HEAD in weights:
        tensors["output.weight"] = weights.read(HEAD)
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if architecture == "llama" else {}
    for i in range(config.num_layers):
        for field, name in GGUF_NAMES.items():
            if layer_name(i, field) in weights:
                array = weights.read(layer_name(i, field))
                tensors[f"blk.{i}.{name}"] = interleave(array, heads[field]) if field in heads else array
    return tensors


def gguf_metadata(config: Any = CONFIG) -> dict[str, Any]:
    tokens = small_vocabulary()
    return {
        "general.name": "small",
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_positions,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.ffn_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    encoding: str = "F32",
    architecture: str = "llama",
) -> Path:
    """A GGUF file; matrices are quantised to `encoding`, vectors stay float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (gguf_metadata() if metadata is None else metadata).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    kind = gguf.GGMLQuantizationType[encoding]
    for name, array in (gguf_tensors() if tensors is None else tensors).items():
        if array.ndim == 1 or encoding == "F32":
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(model: Model, tokens: list[int]) -> np.ndarray:
    """Every row's logits of one prompt, by the CPU decoder."""
    config = model.config
    num_pages = -(-len(tokens) // 32)
    decoder = CpuDecoder(config, model.weights, Arena(config, num_pages), 2)
    out = np.empty((len(tokens), config.vocab_size), np.float32)
    chunk = Chunk(
        tokens=np.array(tokens, np.int32),
        positions=np.arange(len(tokens), dtype=np.int32),
        pages=np.arange(num_pages, dtype=np.int32),
        start=0,
        rows=tuple(memoryview(row) for row in out),
    )
    decoder.step(StepBatch((chunk,)))
    decoder.close()
    return out
