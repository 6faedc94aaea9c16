"""A model's weights as float32 arrays in Hugging Face orientation: what loaders make and decoders pack.

Every matrix is C-contiguous `[out, in]`. Q and K are in the rotate-half convention (un-permuted), so a
loader of GGUF files undoes llama.cpp's permutation first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attn_norm: FloatArray
    """[hidden]"""
    q: FloatArray
    """[heads * head_dim, hidden]"""
    k: FloatArray
    """[kv_heads * head_dim, hidden]"""
    v: FloatArray
    """[kv_heads * head_dim, hidden]"""
    o: FloatArray
    """[hidden, heads * head_dim]"""
    ffn_norm: FloatArray
    """[hidden]"""
    gate: FloatArray
    """[ffn, hidden]"""
    up: FloatArray
    """[ffn, hidden]"""
    down: FloatArray
    """[hidden, ffn]"""


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model."""

    embed: FloatArray
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    final_norm: FloatArray
    """[hidden]"""
    head: FloatArray | None
    """[vocab, hidden], or None when the embedding serves as the head."""
