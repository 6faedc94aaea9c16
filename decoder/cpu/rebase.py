"""Moves entries to other positions without computing them again, and picks pages together from entries of others.

RoPE turns a key by position * frequency, and turns add up: a key of position p serves at q after one more turn by
q - p. V, and whatever the model made of the entries before, stay as they were. The turn's cosine and sine come from
float64, the rest is float32, and the result is rounded to the arena's type once more. In float32 that is the rounding
of any other order of operations; in bfloat16 it is a second rounding of 8 bits, as large as the first.
What a model scales its angles with (`rotation_factor`) is in the key already, and a turn leaves it there.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from decoder.model_config import ModelConfig
from decoder.rope import Doubles, inverse_frequencies
from libsym.abi import PAGE_ENTRIES

Numbers: TypeAlias = npt.NDArray[Any]
"""Elements of an arena: float32, or the bits of bfloat16 as uint16."""
IntArray: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]


class PageShape:
    """How the numbers of a page lie: which axis of K and of V is the entry's.

    `together` neighbours (two dimensions of K, two entries of V) lie side by side: 1 in float32, 2 in bfloat16.
    """

    __slots__ = ("_keys", "_values", "together")

    def __init__(self, config: ModelConfig, together: int) -> None:
        heads, dim = (config.num_layers, config.num_kv_heads), config.head_dim
        self.together = together
        self._keys = (*heads, dim // together, PAGE_ENTRIES, together)
        self._values = (*heads, PAGE_ENTRIES // together, dim, together)

    def keys(self, page: Numbers) -> Numbers:
        """`[layers, kv_heads, dim / together, entry, together]`: a view of a page."""
        return page[:, 0].reshape(self._keys)

    def values(self, page: Numbers) -> Numbers:
        """`[layers, kv_heads, entry / together, dim, together]`: a view of a page."""
        return page[:, 1].reshape(self._values)


class Rebaser:
    """Fills pages with entries of other pages, each moved by a number of positions. Any thread may use it."""

    def __init__(self, config: ModelConfig, shape: PageShape) -> None:
        self._shape = shape
        kinds = [config.slides(layer) and bool(config.local_rope_theta) for layer in range(config.num_layers)]
        self._layers: list[tuple[npt.NDArray[np.intp], Doubles]] = [
            (np.flatnonzero(np.equal(kinds, local)), inverse_frequencies(config, local).reshape(-1, shape.together))
            for local in sorted(set(kinds))
        ]
        """Layers that turn alike, and how fast: a frequency for each dimension of a head's first half."""

    def fill(self, target: Numbers, pages: Numbers, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        """Slot i of page `target` becomes slot `slots[i]` of page `sources[i]`, its position `shifts[i]` higher.

        Slots past the last read as zero. `target` and `pages[n]` are pages as they lie in the arena.
        """
        filled = np.zeros_like(target)
        keys, values, together = self._shape.keys(filled), self._shape.values(filled), self._shape.together
        for first, stop in _runs(sources, slots):
            source, slot = pages[sources[first]], int(slots[first])
            keys[..., first:stop, :] = self._shape.keys(source)[..., slot : slot + stop - first, :]
            from_values = self._shape.values(source)
            for entry in range(first, stop):
                (to, at), (its, its_at) = divmod(entry, together), divmod(slot + entry - first, together)
                values[:, :, to, :, at] = from_values[:, :, its, :, its_at]
        if shifts.any():
            self._turn(keys, shifts)
        target[:] = filled

    def _turn(self, keys: Numbers, shifts: IntArray) -> None:
        """Turn the first entries' keys, in place."""
        count = len(shifts)
        for layers, frequencies in self._layers:
            angles = frequencies[:, None, :] * shifts[:, None]  # [dim / 2 / together, entry, together]
            cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            # The rotate-half convention: dimension i turns with dimension i + dim / 2.
            first, second = np.split(_as_floats(keys[layers, :, :, :count]), 2, axis=2)
            turned = np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=2)
            keys[layers, :, :, :count] = _as_stored(turned, keys.dtype)


def _runs(sources: IntArray, slots: IntArray) -> list[tuple[int, int]]:
    """Where entries lie one after the other in one source: `(first, stop)` of each such piece."""
    cuts = np.flatnonzero((np.diff(sources) != 0) | (np.diff(slots) != 1)) + 1
    edges = [0, *cuts.tolist(), len(slots)]
    return list(itertools.pairwise(edges))


def _as_floats(stored: Numbers) -> Floats:
    if stored.dtype == np.float32:
        return stored
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _as_stored(values: Floats, dtype: np.dtype[Any]) -> Numbers:
    """Rounded to the nearest, ties to even, as the step does."""
    if dtype == np.float32:
        return values
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: Numbers = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return rounded
