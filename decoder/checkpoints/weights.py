"""A model's tensors, each decoded when it is asked for: nothing is held twice, and loading touches no weight.

Names and orientation are Hugging Face's: matrices `[out, in]`, Q and K in the rotate-half row order, norms as
the formula multiplies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from decoder.batch import IntArray
from decoder.checkpoints.quants import FloatArray
from decoder.checkpoints.stored import StoredTensor

__all__ = ["FloatArray", "Weights"]


class Weights:
    """Immutable, so it may be read from several threads at once."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        *,
        interleaved: Mapping[str, int] | None = None,
        norms_without_one: bool = False,
    ) -> None:
        """`interleaved`: heads by tensor whose rows are in llama.cpp's order, in which RoPE turns neighbours.

        `norms_without_one`: norms are stored as Gemma's authors train them, less one.
        """
        self._tensors = dict(tensors)
        self._interleaved = dict(interleaved or {})
        self._norms_without_one = norms_without_one

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, FloatArray]) -> Weights:
        """Over float32 arrays in memory."""
        return cls({name: StoredTensor.of_array(name, array) for name, array in arrays.items()})

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def stored(self, name: str) -> StoredTensor:
        """The tensor as it lies in its file."""
        return self._tensors[name]

    def row_order(self, name: str) -> IntArray | None:
        """Which stored row each row of `read(name)` is; None: they are stored in order."""
        if name not in self._interleaved:
            return None
        rows = np.arange(self.shape(name)[0], dtype=np.int32)
        # Rows of a head: [pair, half] there, [half, pair] for rotate-half.
        return rows.reshape(self._interleaved[name], -1, 2).swapaxes(1, 2).reshape(-1)

    def rows(self, name: str, first: int, end: int) -> StoredTensor:
        """Some rows of a matrix, in the order of `read(name)`, as they lie in the file."""
        stored, order = self._tensors[name], self.row_order(name)
        table = np.frombuffer(stored.data, dtype=np.uint8).reshape(stored.shape[0], -1)
        chosen = table[first:end] if order is None else table[order[first:end]]
        return dataclasses.replace(stored, shape=(end - first, *stored.shape[1:]), data=chosen.reshape(-1).data)

    def read(self, name: str) -> FloatArray:
        """Decoded to float32, anew at every call."""
        stored = self._tensors[name]
        out = np.empty(stored.shape, dtype=np.float32)
        stored.read_into(out)
        if self._norms_without_one and name.endswith("norm.weight"):
            out += 1
        order = self.row_order(name)
        return out if order is None else out[order]
