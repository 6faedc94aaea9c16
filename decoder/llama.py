"""From a checkpoint's tensors to a model's weights: the Llama family's names and shapes, checked, then decoded.

Everything that could be wrong is found before the first byte is decoded: a missing tensor, a shape that
the configuration does not give, a tensor that this release would have to leave out (a bias, a norm of Q),
too little memory.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decoder.config import ModelConfig
from decoder.memory import available_memory_bytes
from decoder.stored import StoredTensor
from decoder.weights import FloatArray, LayerWeights, Weights
from libsym.errors import Invalid, SymError

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

LAYER_TENSORS = {  # field of LayerWeights -> name in a Hugging Face layer
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

_MAX_SIZE = 1 << 31
_MAX_LAYERS = 1 << 12
_MAX_POSITIONS = 1 << 24  # decoders keep a table of rotations for every position


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: its configuration and its tensors under their Hugging Face names."""

    path: Path
    config: ModelConfig
    tensors: dict[str, StoredTensor]
    interleaved_rope: bool
    """Q and K are in llama.cpp's row order, in which RoPE turns neighbours: (0, 1), (2, 3), …"""


def check_config(config: ModelConfig, where: Path) -> ModelConfig:
    """The configuration, or an error if no Llama-family model can have it."""
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
    return config


def read_weights(checkpoint: Checkpoint) -> Weights:
    """Decode a checkpoint to float32, on every CPU this process may use."""
    _check_tensors(checkpoint)
    check_memory(str(checkpoint.path), checkpoint.config)
    jobs: list[tuple[StoredTensor, Callable[[], None]]] = []

    def read(name: str, num_interleaved_heads: int = 0) -> FloatArray:
        stored = checkpoint.tensors[name]
        out = np.empty(stored.shape, dtype=np.float32)
        jobs.append((stored, lambda: _decode(stored, out, num_interleaved_heads)))
        return out

    config = checkpoint.config
    interleaved = {"q": config.num_heads, "k": config.num_kv_heads} if checkpoint.interleaved_rope else {}
    weights = Weights(
        embed=read(EMBED),
        layers=tuple(
            LayerWeights(**{field: read(layer_name(i, field), interleaved.get(field, 0)) for field in LAYER_TENSORS})
            for i in range(config.num_layers)
        ),
        final_norm=read(FINAL_NORM),
        head=None if config.tie_embeddings else read(HEAD),
    )
    jobs.sort(key=lambda job: -job[0].num_values)  # the embedding first: it would be the last to finish
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="load") as pool:
        for future in [pool.submit(decode) for _, decode in jobs]:
            future.result()
    return weights


def layer_name(layer: int, field: str) -> str:
    """The Hugging Face name of a layer's tensor."""
    return f"model.layers.{layer}.{LAYER_TENSORS[field]}.weight"


def weights_by_name(weights: Weights) -> Iterator[tuple[str, FloatArray]]:
    """Every tensor of a model in memory, by its Hugging Face name."""
    yield EMBED, weights.embed
    yield FINAL_NORM, weights.final_norm
    if weights.head is not None:
        yield HEAD, weights.head
    for layer, layer_weights in enumerate(weights.layers):
        for field in LAYER_TENSORS:
            yield layer_name(layer, field), getattr(layer_weights, field)


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that a model of this configuration has, with its shape."""
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
            raise Invalid(f"{stored.file}: tensor {stored.name[:80]!r} is not supported: a plain Llama has none of it")


def check_memory(name: str, config: ModelConfig) -> None:
    """An error with the figures if the weights do not fit as float32."""
    needed = 4 * sum(math.prod(shape) for _, shape in tensor_shapes(config))
    available = available_memory_bytes()
    if needed > available:
        raise SymError(
            f"{name}: the weights take {needed / 1e9:.1f} GB as float32, {available / 1e9:.1f} GB of memory "
            "are available: choose a smaller model, or free or add memory",
            errno.ENOMEM,
        )


def _decode(stored: StoredTensor, out: FloatArray, num_interleaved_heads: int) -> None:
    if not num_interleaved_heads:
        stored.read_into(out)
        return
    interleaved = np.empty_like(out)
    stored.read_into(interleaved)
    # Rows of a head: [pair, half] there, [half, pair] for rotate-half.
    head_shape = (num_interleaved_heads, -1, 2, out.shape[1])
    halves = (num_interleaved_heads, 2, -1, out.shape[1])
    np.copyto(out.reshape(halves), interleaved.reshape(head_shape).swapaxes(1, 2))
