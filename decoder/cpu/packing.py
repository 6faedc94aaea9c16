"""Weights as the CPU step reads them: panels of 32 output features side by side, in huge pages.

A panel is `[in][32]`, so that a product's vector lanes run across output features and its sum over `in` is
one chain in order. Another precision is another `PackedWeights`, with kernels of its own.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from decoder.config import ModelConfig
from decoder.cpu._step import ffi, lib
from decoder.weights import FloatArray, Weights

_STRIP = 16
"""Features that are packed as one: half a panel."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The C structs and every array that they point into."""

    layers: Any
    """`sym_layer[num_layers]`"""
    embed: FloatArray
    """[vocab, hidden], not packed: rows are looked up in it."""
    final_norm: FloatArray
    head: FloatArray
    owned: tuple[FloatArray, ...]
    num_bytes: int
    """What one row reads: everything but the embedding matrix."""


def pack_weights(config: ModelConfig, weights: Weights) -> PackedWeights:
    """A packed copy; of `weights` it keeps the embedding and the norms."""
    hidden, ffn = config.hidden_size, config.ffn_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = [(heads + 2 * kv, hidden), (hidden, heads), (2 * ffn, hidden), (hidden, ffn)] * config.num_layers
    sizes = [lib.sym_packed_size(*shape) for shape in (*shapes, (config.vocab_size, hidden))]
    blocks = _allocate(sizes)
    head = blocks.pop()
    layers = ffi.new("sym_layer[]", config.num_layers)
    norms = []
    for index, layer in enumerate(weights.layers):
        qkv, o, gate_up, down = blocks[4 * index : 4 * index + 4]
        _pack(layer.q, qkv)
        _pack(layer.k, qkv, first=heads // _STRIP)
        _pack(layer.v, qkv, first=(heads + kv) // _STRIP)
        _pack(layer.o, o)
        # Gate and up take turns: a panel has sixteen features of each, and multiplies them as it ends.
        _pack(layer.gate, gate_up, every=2)
        _pack(layer.up, gate_up, first=1, every=2)
        _pack(layer.down, down)
        attn_norm, ffn_norm = _floats(layer.attn_norm), _floats(layer.ffn_norm)
        norms += [attn_norm, ffn_norm]
        layers[index].attn_norm, layers[index].ffn_norm = pointer(attn_norm), pointer(ffn_norm)
        layers[index].qkv, layers[index].o = pointer(qkv), pointer(o)
        layers[index].gate_up, layers[index].down = pointer(gate_up), pointer(down)
    _pack(weights.embed if weights.head is None else weights.head, head)
    return PackedWeights(
        layers=layers,
        embed=_floats(weights.embed),
        final_norm=_floats(weights.final_norm),
        head=head,
        owned=(*blocks, *norms),
        num_bytes=4 * sum(sizes),
    )


def pointer(array: FloatArray) -> Any:
    """The address of an array's first element; whoever keeps it keeps the array too."""
    return ffi.cast("float *", array.ctypes.data)


def _floats(array: FloatArray) -> FloatArray:
    return np.ascontiguousarray(array, dtype=np.float32)


def _pack(matrix: FloatArray, packed: FloatArray, first: int = 0, every: int = 1) -> None:
    source = _floats(matrix)
    lib.sym_pack(pointer(source), source.shape[0], source.shape[1], pointer(packed), first, every)


def _allocate(sizes: list[int]) -> list[FloatArray]:
    """Zeroed arrays of that many floats in one anonymous mapping, each on a cache line's boundary."""
    starts = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)])
    mapping = mmap.mmap(-1, 4 * int(starts[-1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    floats = np.frombuffer(mapping, dtype=np.float32)
    return [floats[start : start + size] for start, size in zip(starts, sizes, strict=False)]
