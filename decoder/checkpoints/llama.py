"""Weights of a model of the Llama family, with the checks of its configuration, tensor names and shapes.

The checks run before any tensor is decoded. They find a missing tensor, a shape that differs from the configuration,
and a tensor that this release cannot use (a bias of the MLP, an attention sink). Values that are not finite are found
later, when the tensor is read.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from decoder.checkpoints.weights import Tensor, Weights
from decoder.memory import available_memory_bytes
from decoder.model_config import ModelConfig, RopeScaling
from libsym.errors import Invalid, SymError

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

LAYER_TENSORS = {  # field -> name in a Hugging Face layer
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    # Checkpoints of Gemma 2 and 3 call this tensor post_attention_layernorm, and the ffn_norm
    # pre_feedforward_layernorm. The reader renames both, so that each name has one meaning.
    "post_attn_norm": "post_attention_norm.weight",
    "post_ffn_norm": "post_feedforward_layernorm.weight",
}
_MAX_SIZE = 1 << 31
_MAX_LAYERS = 1 << 12
_MAX_POSITIONS = 1 << 24


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: its configuration and its tensors under their Hugging Face names."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    interleaved_rope: bool
    """Whether Q and K are in llama.cpp's row order. RoPE then rotates pairs of neighbours: (0, 1), (2, 3), …"""
    norms_without_one: bool = False
    """Whether the file stores each norm minus 1 (Gemma from Hugging Face)."""


def check_config(config: ModelConfig, where: Path) -> ModelConfig:
    """Return the configuration. Invalid: no model of the Llama family can have it."""
    sizes = {
        "vocabulary": config.vocab_size,
        "hidden size": config.hidden_size,
        "heads": config.num_heads,
        "KV heads": config.num_kv_heads,
        "head dimension": config.head_dim,
        "feed-forward size": config.ffn_size,
    }
    for what, size in sizes.items():
        if not 1 <= size < _MAX_SIZE:
            raise Invalid(f"{where}: the configuration says {what} = {size}, which is impossible")
    if not 1 <= config.max_positions <= _MAX_POSITIONS:
        raise Invalid(f"{where}: the configuration says {config.max_positions} positions, which is impossible")
    if not 1 <= config.num_layers <= _MAX_LAYERS:
        raise Invalid(f"{where}: the configuration says {config.num_layers} layers, which is impossible")
    if config.num_heads % config.num_kv_heads:
        raise Invalid(f"{where}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise Invalid(f"{where}: RoPE needs an even head dimension, the configuration says {config.head_dim}")
    if not 1 <= config.rope_theta < float("inf"):
        raise Invalid(f"{where}: the configuration says RoPE theta = {config.rope_theta}, which is impossible")
    if not 0 < config.rms_eps < 1:
        raise Invalid(f"{where}: the configuration says a norm epsilon of {config.rms_eps}, which is impossible")
    if config.rope_scaling is not None:
        _check_scaling(config, config.rope_scaling, where)
    if not (config.local_rope_theta == 0 or 1 <= config.local_rope_theta < float("inf")):
        raise Invalid(f"{where}: the configuration says a local RoPE theta of {config.local_rope_theta}")
    assert len(config.sliding_layers) == (config.num_layers if config.window else 0), config.sliding_layers
    return config


def _check_scaling(config: ModelConfig, scaling: RopeScaling, where: Path) -> None:
    """Check a scaling's numbers. The bounds are far beyond real models, and keep the formulas finite."""
    least, most = 1e-6, 1e6
    possible = least < scaling.factor < most and least < scaling.attention_factor < most
    if scaling.kind in {"llama3", "yarn"}:
        possible = possible and 1 <= scaling.original_positions <= _MAX_POSITIONS
    if scaling.kind == "llama3":
        possible = possible and least < scaling.low_freq_factor < scaling.high_freq_factor < most
    if scaling.kind == "yarn":
        possible = possible and least < scaling.beta_slow <= scaling.beta_fast < most and config.rope_theta > 1
    if scaling.kind == "factors":
        possible = possible and len(scaling.factors) == config.head_dim // 2
        possible = possible and all(least < factor < most for factor in scaling.factors)
    if not possible:
        raise Invalid(f"{where}: the configuration says a RoPE scaling that is impossible: {str(scaling)[:120]}")


def open_weights(checkpoint: Checkpoint) -> Weights:
    """Check that a checkpoint has all tensors in the right shapes, and return its weights. Nothing is decoded yet."""
    _check_tensors(checkpoint)
    config, interleaved = checkpoint.config, {}
    if checkpoint.interleaved_rope:
        for layer in range(config.num_layers):
            interleaved[layer_name(layer, "q")] = config.num_heads
            interleaved[layer_name(layer, "k")] = config.num_kv_heads
    return Weights(checkpoint.tensors, interleaved=interleaved, norms_without_one=checkpoint.norms_without_one)


def layer_name(layer: int, field: str) -> str:
    """Return the checkpoint's name of a layer's tensor."""
    return f"model.layers.{layer}.{LAYER_TENSORS[field]}"


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor of a model with this configuration."""
    hidden, ffn = config.hidden_size, config.ffn_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (heads, hidden),
        "k": (kv_heads, hidden),
        "v": (kv_heads, hidden),
        "o": (hidden, heads),
        "ffn_norm": (hidden,),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (heads,), "k_bias": (kv_heads,), "v_bias": (kv_heads,)}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.post_norms:
        shapes |= {"post_attn_norm": (hidden,), "post_ffn_norm": (hidden,)}
    yield EMBED, (config.vocab_size, hidden)
    yield FINAL_NORM, (hidden,)
    if not config.tie_embeddings:
        yield HEAD, (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for field, shape in shapes.items():
            yield layer_name(layer, field), shape


def _check_tensors(checkpoint: Checkpoint) -> None:
    known = set()
    for name, shape in tensor_shapes(checkpoint.config):
        stored = checkpoint.tensors.get(name)
        if stored is None:
            raise Invalid(f"{checkpoint.path}: the tensor {name} is missing: the checkpoint is incomplete")
        if stored.shape != shape:
            raise Invalid(
                f"{stored.file}: tensor {stored.name} has the shape {list(stored.shape)}, "
                f"the configuration says {list(shape)}"
            )
        known.add(name)
    for name, stored in checkpoint.tensors.items():
        if name not in known:
            family = checkpoint.config.architecture
            raise Invalid(
                f"{stored.file}: tensor {stored.name[:80]!r} is not supported: {family} models have no such tensor"
            )


def check_memory(name: str, config: ModelConfig) -> None:
    """Raise ENOMEM, with the sizes, if the weights as float32 do not fit in memory."""
    needed = 4 * sum(math.prod(shape) for _, shape in tensor_shapes(config))
    available = available_memory_bytes()
    if needed > available:
        raise SymError(
            f"{name}: the weights take {needed / 1e9:.1f} GB as float32, {available / 1e9:.1f} GB of memory "
            "are available: choose a smaller model, or free or add memory",
            errno.ENOMEM,
        )
