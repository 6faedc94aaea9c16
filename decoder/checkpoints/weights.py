"""A model's tensors, each decoded when a caller reads it. So no tensor is in memory twice.

Names and orientation follow Hugging Face: matrices are `[out, in]`, and Q and K are in the rotate-half row order.
Norms of Gemma include the 1 that Gemma's formula adds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from decoder.batch import IntArray
from decoder.checkpoints.coded_matrix import CodedMatrix
from decoder.checkpoints.quants import Float32Array
from decoder.checkpoints.stored import StoredTensor

__all__ = ["Float32Array", "Weights"]

Tensor: TypeAlias = StoredTensor | CodedMatrix


class Weights:
    """The tensors of a model, by name. The object is immutable, so several threads may read it concurrently."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        interleaved: Mapping[str, int] | None = None,
        norms_without_one: bool = False,
    ) -> None:
        """Wrap the stored tensors.

        `interleaved` has the number of heads of each tensor whose rows are in llama.cpp's order, in which RoPE
        rotates pairs of neighbours. `norms_without_one`: the file stores each norm minus 1, as files of Gemma do.
        """
        self._tensors = dict(tensors)
        self._interleaved = dict(interleaved or {})
        self._norms_without_one = norms_without_one

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Float32Array]) -> Weights:
        """Return weights over float32 arrays in memory."""
        return cls({name: StoredTensor.of_array(name, array) for name, array in arrays.items()})

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def stored(self, name: str) -> Tensor:
        """Return the tensor, encoded as in its file."""
        return self._tensors[name]

    def kinds(self) -> str:
        """Return how many tensors of each encoding there are, for people: `14 AWQ 4-bit, 9 BF16`."""
        kinds = Counter(stored.encoding.name for stored in self._tensors.values())
        return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())

    def row_order(self, name: str) -> IntArray | None:
        """Return the index of the stored row for each row of `read(name)`; None: the two orders are the same."""
        if name not in self._interleaved:
            return None
        rows = np.arange(self.shape(name)[0], dtype=np.int32)
        # A head's rows are [pair, half] in llama.cpp's order, and [half, pair] in the rotate-half order.
        return rows.reshape(self._interleaved[name], -1, 2).swapaxes(1, 2).reshape(-1)

    def rows(self, name: str, first: int, end: int) -> StoredTensor:
        """Return rows of a matrix, in the order of `read(name)`, encoded as in the file."""
        stored, order = self._tensors[name], self.row_order(name)
        if order is None:
            return stored.rows(first, end)
        whole = stored.rows(0, stored.shape[0])
        chosen = np.frombuffer(whole.data, dtype=np.uint8).reshape(whole.shape[0], -1)[order[first:end]]
        return dataclasses.replace(whole, shape=(end - first, *whole.shape[1:]), data=chosen.reshape(-1).data)

    def read(self, name: str) -> Float32Array:
        """Decode a tensor to a new float32 array."""
        stored = self._tensors[name]
        out = np.empty(stored.shape, dtype=np.float32)
        stored.read_into(out)
        if self._norms_without_one and name.endswith("norm.weight"):
            out += 1
        order = self.row_order(name)
        return out if order is None else out[order]
