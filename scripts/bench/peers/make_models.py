#!/usr/bin/env python3
"""Write the default model in the formats of the peers, all from the packaged GGUF file.

    .venv/bin/python scripts/bench/peers/make_models.py DIRECTORY [--quantize LLAMA_QUANTIZE]

DIRECTORY/ckpt-bf16     a Hugging Face checkpoint, for vLLM and for OpenVINO's export
DIRECTORY/smol-F32.gguf the same weights for llama.cpp; with its llama-quantize also smol-BF16, -Q8_0 and -Q4_0
DIRECTORY/smol-Q4_1.gguf the packaged file, the source of all weights
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from decoder.model import load_model, packaged_gguf
from decoder.model_config import ModelConfig

WRITTEN_BY_THE_WRITER = {"general.architecture", "general.file_type"}


def write_f32(source: Path, target: Path) -> None:
    """Write the source file again with every tensor in float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(LlamaFileType.ALL_F32)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in WRITTEN_BY_THE_WRITER:
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, element)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_model(config: ModelConfig, weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    assert config.architecture == "llama", f"{config.architecture} models are not set up here"
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tie_embeddings,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()
    result = model.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def write_checkpoint(source: Path, target: Path) -> None:
    ours = load_model(str(source))
    weights = {name: torch.from_numpy(ours.weights.read(name)) for name in ours.weights.names()}
    llama_model(ours.config, weights).to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quantize", type=Path, help="llama.cpp's llama-quantize")
    options = parser.parse_args()
    target, source = options.directory, packaged_gguf()
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target / "smol-Q4_1.gguf")
    write_f32(source, target / "smol-F32.gguf")
    for kind in ("BF16", "Q8_0", "Q4_0") if options.quantize else ():
        subprocess.run([options.quantize, target / "smol-F32.gguf", target / f"smol-{kind}.gguf", kind], check=True)
    write_checkpoint(source, target / "ckpt-bf16")


if __name__ == "__main__":
    main()
