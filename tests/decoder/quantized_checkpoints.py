"""Small quantised checkpoints of Hugging Face, written as each format's own documents say, a number at a time."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from decoder.checkpoints.llama import EMBED, HEAD
from decoder.model_config import ModelConfig
from decoder.tiny import random_weights, tiny_config
from tests.decoder.small_checkpoints import TEMPLATE, VOCAB_SIZE, small_library

CONFIG = tiny_config(
    vocab_size=VOCAB_SIZE, hidden_size=128, num_layers=1, head_dim=32, ffn_size=256, tie_embeddings=False
)
Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, np.ndarray]
"""A module's tensors, and the weights that they mean."""


@dataclass(frozen=True)
class Format:
    settings: dict[str, Any]
    write: Callable[[np.ndarray, np.random.Generator], Written]
    precision: str
    """The precision that a daemon chooses."""
    is_exact: bool = True
    """Whether the kernels' float16 holds scales and mins of the 4-bit codes."""


def int32(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def coded(
    weights: np.ndarray, bits: int, groups: np.ndarray, symmetric: bool, scale_type: torch.dtype = torch.float16
) -> tuple[np.ndarray, torch.Tensor, np.ndarray, np.ndarray]:
    """Codes `[out, in]`, scales and zeros `[out, groups]`, and the weights that these mean."""
    top, half = (1 << bits) - 1, 1 << (bits - 1)
    num_groups = int(groups.max()) + 1
    scales = np.empty((len(weights), num_groups))
    zeros = np.full(scales.shape, half, np.int64)
    for group in range(num_groups):
        chosen = weights[:, groups == group]
        low, high = chosen.min(axis=1), chosen.max(axis=1)
        scales[:, group] = 2 * np.abs(chosen).max(axis=1) / top if symmetric else (high - low) / top
        if not symmetric:
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), 0, top)
    stored = torch.from_numpy(scales).to(scale_type)
    scales = stored.double().numpy()
    codes = np.clip(np.rint(weights / scales[:, groups]) + zeros[:, groups], 0, top).astype(np.int64)
    return codes, stored, zeros, ((codes - zeros[:, groups]) * scales[:, groups]).astype(np.float32)


def packed(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Words along the last axis: number `order[i]` of each word has the i-th lowest bits."""
    per_word = 32 // bits
    order = list(range(per_word)) if order is None else order
    padded = np.zeros((len(numbers), -(-numbers.shape[1] // per_word) * per_word), np.int64)
    padded[:, : numbers.shape[1]] = numbers
    words = np.zeros((len(numbers), padded.shape[1] // per_word), np.int64)
    for column in range(words.shape[1]):
        for i in range(per_word):
            words[:, column] |= padded[:, column * per_word + order[i]] << (bits * i)
    return words


def in_order(size: int, group: int) -> np.ndarray:
    return np.arange(size) // (size if group == -1 else group)


def awq(group: int, *, zero_point: bool = True) -> Format:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def write(weights: np.ndarray, _rng: np.random.Generator) -> Written:
        codes, scales, zeros, meant = coded(weights, 4, in_order(weights.shape[1], group), not zero_point)
        tensors = {"qweight": int32(packed(codes.T, 4, order)), "scales": scales.T.contiguous()}
        if zero_point:
            tensors["qzeros"] = int32(packed(zeros.T, 4, order))
        return tensors, meant

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": zero_point}
    return Format(settings, write, "int4", is_exact=not zero_point)


def gptq(bits: int, group: int, *, sym: bool = True, desc_act: bool = False, form: str | None = None) -> Format:
    def write(weights: np.ndarray, rng: np.random.Generator) -> Written:
        groups = in_order(weights.shape[1], group)
        groups = groups[rng.permutation(len(groups))] if desc_act else groups
        codes, scales, zeros, meant = coded(weights, bits, groups, sym)
        words = packed(zeros.T, bits)
        if form != "gptq_v2":
            words = words - (0x11111111 if bits == 4 else 0x01010101)
        tensors = {
            "qweight": int32(packed(codes, bits).T),
            "qzeros": int32(words & 0xFFFFFFFF),
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, meant

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act}
    precision = "int4" if bits == 4 and (not desc_act or group == -1) else "int8"
    return Format(settings | ({"checkpoint_format": form} if form else {}), write, precision, is_exact=sym)


def compressed(form: str, kind: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def pack_quantized(
    bits: int,
    strategy: str,
    group: int = -1,
    *,
    symmetric: bool = True,
    actorder: str | None = None,
    scale_type: torch.dtype = torch.bfloat16,
) -> Format:
    def write(weights: np.ndarray, rng: np.random.Generator) -> Written:
        groups = in_order(weights.shape[1], group)
        groups = groups[rng.permutation(len(groups))] if actorder == "group" else groups
        codes, scales, zeros, meant = coded(weights, bits, groups, symmetric, scale_type)
        tensors = {
            "weight_packed": int32(packed(codes, bits)),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weights.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = int32(packed(zeros.T, bits).T)
        if actorder == "group":
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, meant

    size = {} if strategy == "channel" else {"group_size": group}
    settings = compressed("pack-quantized", "int", bits, strategy, symmetric=symmetric, actorder=actorder, **size)
    precision = "int4" if bits == 4 and actorder != "group" else "int8"
    return Format(settings, write, precision, is_exact=symmetric)


def int_quantized(strategy: str, *, symmetric: bool = True) -> Format:
    def write(weights: np.ndarray, _rng: np.random.Generator) -> Written:
        rows = weights.reshape(1, -1) if strategy == "tensor" else weights
        codes, scales, zeros, meant = coded(rows, 8, np.zeros(rows.shape[1], np.int64), symmetric, torch.bfloat16)
        tensors = {"weight": torch.from_numpy((codes - 128).astype(np.int8).reshape(weights.shape))}
        shape = (1,) if strategy == "tensor" else (len(weights), 1)
        tensors["weight_scale"] = scales.reshape(shape)
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8)).reshape(shape)
        return tensors, meant.reshape(weights.shape)

    return Format(compressed("int-quantized", "int", 8, strategy, symmetric=symmetric), write, "int8")


def float8(weights: np.ndarray, rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Numbers in e4m3, a scale for each block, and the weights that these mean."""
    numbers = torch.empty(weights.shape, dtype=torch.float8_e4m3fn)
    meant = np.empty(weights.shape, np.float32)
    scales = torch.empty(-(-weights.shape[0] // rows), -(-weights.shape[1] // inputs))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * inputs, (j + 1) * inputs)
            scales[i, j] = float(np.abs(weights[at]).max()) / 448
            numbers[at] = torch.from_numpy(weights[at] / scales[i, j].item()).to(torch.float8_e4m3fn)
            meant[at] = (numbers[at].double() * scales[i, j].double()).float().numpy()
    return numbers, scales, meant


def fp8(strategy: str, *, block: tuple[int, int] = (128, 128), in_compressed: bool = False) -> Format:
    name = "weight_scale_inv" if strategy == "block" and not in_compressed else "weight_scale"

    def write(weights: np.ndarray, _rng: np.random.Generator) -> Written:
        size = {"tensor": weights.shape, "channel": (1, weights.shape[1]), "block": block}[strategy]
        numbers, scales, meant = float8(weights, *size)
        return {"weight": numbers, name: scales.reshape(()) if strategy == "tensor" else scales}, meant

    if in_compressed:
        structure = {"block_structure": list(block)} if strategy == "block" else {}
        return Format(compressed("float-quantized", "float", 8, strategy, **structure), write, "int8")
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return Format(settings | ({"weight_block_size": list(block)} if strategy == "block" else {}), write, "int8")


FORMATS = {
    "awq 128": awq(128),
    "awq 64": awq(64),
    "awq 32": awq(32),
    "awq without zeros": awq(32, zero_point=False),
    "gptq 4 128": gptq(4, 128),
    "gptq 4 32, not symmetric": gptq(4, 32, sym=False),
    "gptq 4 64, v2": gptq(4, 64, sym=False, form="gptq_v2"),
    "gptq 4, one group": gptq(4, -1, form="gptq"),
    "gptq 4 32, act-order": gptq(4, 32, sym=False, desc_act=True),
    "gptq 4, one group, act-order": gptq(4, -1, desc_act=True),
    "gptq 8 128": gptq(8, 128),
    "gptq 8 32, not symmetric, act-order": gptq(8, 32, sym=False, desc_act=True),
    "gptq 8, v2": gptq(8, -1, sym=False, form="gptq_v2"),
    "packed 4 128": pack_quantized(4, "group", 128),
    "packed 4 32, not symmetric": pack_quantized(4, "group", 32, symmetric=False),
    "packed 4, channels": pack_quantized(4, "channel"),
    "packed 4 64, act-order": pack_quantized(4, "group", 64, actorder="group"),
    "packed 4 64, ordered weights": pack_quantized(4, "group", 64, actorder="weight", scale_type=torch.float16),
    "packed 8 64": pack_quantized(8, "group", 64),
    "packed 8, channels, not symmetric": pack_quantized(8, "channel", symmetric=False),
    "int8, channels": int_quantized("channel"),
    "int8, channels, not symmetric": int_quantized("channel", symmetric=False),
    "int8, tensor": int_quantized("tensor"),
    "float8, tensor": fp8("tensor", in_compressed=True),
    "float8, channels": fp8("channel", in_compressed=True),
    "float8, blocks": fp8("block", in_compressed=True),
    "fp8, tensor": fp8("tensor"),
    "fp8, channels": fp8("channel"),
    "fp8, blocks": fp8("block"),
    "fp8, blocks that do not fill": fp8("block", block=(96, 80)),
}


def tensors_of(form: Format, config: ModelConfig = CONFIG, shift: float = 1) -> tuple[Tensors, dict[str, np.ndarray]]:
    """The tensors of a checkpoint, and the weights that they mean. With a shift, zeros of groups have all values."""
    rng, weights = np.random.default_rng(5), random_weights(config, 5)
    tensors, meant = Tensors(), dict[str, np.ndarray]()
    for name in weights.names():
        values = weights.read(name)
        if values.ndim == 2 and name not in (EMBED, HEAD):
            values = values + shift * np.linspace(-1, 1, len(values), dtype=np.float32)[:, None] * np.abs(values).max()
            parts, meant[name] = form.write(values, rng)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": each.contiguous() for part, each in parts.items()}
        else:
            tensors[name] = torch.from_numpy(values).bfloat16()
            meant[name] = tensors[name].float().numpy()
    return tensors, meant


def config_of(config: ModelConfig, settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM" if config.qkv_bias else "LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "quantization_config": settings,
    }


def write_checkpoint(directory: Path, tensors: Tensors, settings: Any, config: ModelConfig = CONFIG) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config_of(config, settings)))
    small_library().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
