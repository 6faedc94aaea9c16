"""Rebase: moves entries to other positions without computing them again.

RoPE rotates a key by position * frequency, and rotations add up. So a key of position p is valid at position q after
one more rotation by q - p. V does not change. The influence of earlier entries on K and V does not change either. The
rotation's cosine and sine are computed in float64, and the products in float32. The result is rounded once more to the
arena's type. In float32, this error is as small as the error of another order of operations. In bfloat16, it is a
second rounding to 8 bits, as large as the first rounding. The model's factor of cosine and sine (`rotation_factor`) is
in the key already, and a rotation keeps it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from decoder.batch import IntArray
from decoder.model_config import ModelConfig
from decoder.rope import Doubles, inverse_frequencies
from libsym.abi import PAGE_ENTRIES

Numbers: TypeAlias = npt.NDArray[Any]
"""Elements of an arena: float32, or the bits of bfloat16 as uint16."""
Floats: TypeAlias = npt.NDArray[np.float32]


class PageShape:
    """The order of a page's numbers: the axes of K and of V.

    `together` is 1 in float32 and 2 in bfloat16, where two dimensions of K, or two entries of V, lie side by side.
    """

    __slots__ = ("_keys", "_values", "together")

    def __init__(self, config: ModelConfig, together: int) -> None:
        heads, dim = (config.num_layers, config.num_kv_heads), config.head_dim
        self.together = together
        self._keys = (*heads, dim // together, PAGE_ENTRIES, together)
        self._values = (*heads, PAGE_ENTRIES // together, dim, together)

    def keys(self, page: Numbers) -> Numbers:
        """Return a view of a page's K, `[layers, kv_heads, dim / together, entry, together]`."""
        return page[:, 0].reshape(self._keys)

    def values(self, page: Numbers) -> Numbers:
        """Return a view of a page's V, `[layers, kv_heads, entry / together, dim, together]`."""
        return page[:, 1].reshape(self._values)


class Rebaser:
    """Moves the entries of pages. Any thread may use a rebaser."""

    def __init__(self, config: ModelConfig, shape: PageShape) -> None:
        self._shape = shape
        kinds = [config.slides(layer) and bool(config.local_rope_theta) for layer in range(config.num_layers)]
        self._layers: list[tuple[npt.NDArray[np.intp], Doubles]] = [
            (np.flatnonzero(np.equal(kinds, local)), inverse_frequencies(config, local).reshape(-1, shape.together))
            for local in sorted(set(kinds))
        ]
        """Groups of layers with their frequencies: a frequency for each dimension of a head's first half."""

    def move(self, page: Numbers, shifts: IntArray) -> None:
        """Move entry i of a page up by `shifts[i]` positions: rotate its keys, in place."""
        keys, count = self._shape.keys(page), len(shifts)
        for layers, frequencies in self._layers:
            angles = frequencies[:, None, :] * shifts[:, None]  # [dim / 2 / together, entry, together]
            cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            # The rotate-half convention: dimensions i and i + dim / 2 are rotated as a pair.
            first, second = np.split(_as_floats(keys[layers, :, :, :count]), 2, axis=2)
            turned = np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=2)
            keys[layers, :, :, :count] = _as_stored(turned, keys.dtype)


def _as_floats(stored: Numbers) -> Floats:
    if stored.dtype == np.float32:
        return stored
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _as_stored(values: Floats, dtype: np.dtype[Any]) -> Numbers:
    """Round to the arena's type: to nearest, ties to even, as the step does."""
    if dtype == np.float32:
        return values
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: Numbers = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return rounded
