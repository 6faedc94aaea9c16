"""Matrices of quantised checkpoints from Hugging Face: codes, scales and zeros in several tensors.

A weight is (level of its code - zero) * scale. Scales and zeros belong to blocks of the matrix: to a row's group of
inputs, to a whole row, to 128 rows by 128 inputs, or to the whole matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from decoder.batch import IntArray
from decoder.checkpoints.quants import GROUP, GROUP_VALUES, ByteArray, Encoding, Float32Array
from decoder.checkpoints.stored import StoredTensor
from libsym.errors import Invalid

Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class PackedNumbers:
    """Table `[rows, columns]` of small unsigned numbers, several in each word of a tensor."""

    words: Words
    """`[rows, words]`; with `along_rows`, `[rows / numbers of a word, columns]`."""
    bits: int
    places: tuple[int, ...]
    """Place of each number in its word; place 0 has the lowest bits."""
    along_rows: bool
    """Whether the numbers of a word belong to successive rows, not to successive columns."""
    added: int = 0
    """Number that is added to each word, modulo the word's size, before the word is split."""

    def rows(self, first: int, end: int) -> ByteArray:
        """Return the numbers in rows [first, end)."""
        per_word = len(self.places)
        skipped = first % per_word if self.along_rows else 0
        chosen = self.words[first // per_word : -(-end // per_word)] if self.along_rows else self.words[first:end]
        words = np.ascontiguousarray(chosen) + self.words.dtype.type(self.added)
        axis = 1 if self.along_rows else 2
        out = np.empty((*words.shape[:axis], per_word, *words.shape[axis:]), np.uint8)
        for index, place in enumerate(self.places):
            np.moveaxis(out, axis, 0)[index] = words >> (self.bits * place) & ((1 << self.bits) - 1)
        if self.along_rows:
            return out.reshape(-1, words.shape[1])[skipped : skipped + end - first]
        return out.reshape(end - first, -1)


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix of a quantised checkpoint. Its interface is that of `StoredTensor`."""

    name: str
    encoding: Encoding
    """Encoding of `rows`: codes with a scale and a zero for 32 inputs, or else float32."""
    shape: tuple[int, int]
    parts: tuple[StoredTensor, ...]
    """The tensors of the file; the first has the codes."""
    codes: PackedNumbers
    levels: Float32Array
    """Level of each code."""
    scales: Words
    """Stored bits of the scales, `[rows of blocks, columns of blocks]`."""
    scale_encoding: Encoding
    zeros: PackedNumbers | None
    """Zeros of the blocks. None: all zeros are `zero`."""
    zero: int | None
    """The zero of all blocks, even if the file stores zeros. None: blocks have zeros of their own."""
    block: tuple[int, int]
    """Rows and inputs of a block."""
    groups: IntArray | None
    """Column of blocks for each input. None: successive inputs share a block."""

    @property
    def file(self) -> Path:
        return self.parts[0].file

    def read_ahead(self, first: int, end: int) -> None:  # noqa: ARG002 - rows may lie across the whole tensor
        """Have the kernel read all codes into the page cache before the first rows are needed."""
        if first == 0:
            self.parts[0].read_ahead(0, self.parts[0].shape[0])

    def rows(self, first: int, end: int) -> StoredTensor:
        """Return rows of the matrix. Invalid: the file has other zeros than its configuration says."""
        num_rows, num_inputs = end - first, self.shape[1]
        codes, at = self.codes.rows(first, end)[:, :num_inputs], np.arange(first, end) // self.block[0]
        scales = np.empty((num_rows, self.scales.shape[1]), np.float32)
        stored = np.ascontiguousarray(self.scales[at])
        self.scale_encoding.decode(stored.view(np.uint8).reshape(-1, stored.itemsize), scales.reshape(-1, 1))
        zeros = self._zeros(at)
        values: npt.NDArray[Any]
        if self.encoding.coding is None:
            values = np.take(self.levels if self.zero is None else self.levels - np.float32(self.zero), codes)
            with np.errstate(all="ignore"):  # the reader of the rows checks that the values are finite
                if zeros is not None:
                    values -= self._of_inputs(zeros)
                values *= self._of_inputs(scales)
        else:
            num_groups, repeats = num_inputs // GROUP_VALUES, self.block[1] // GROUP_VALUES
            values = np.empty((num_rows, num_groups), GROUP)
            values["codes"] = codes.reshape(num_rows, num_groups, GROUP_VALUES)
            values["scale"] = np.repeat(scales, repeats, axis=1)[:, :num_groups]
            values["zero"] = self.zero if zeros is None else np.repeat(zeros, repeats, axis=1)[:, :num_groups]
        data = values.reshape(-1).view(np.uint8).data
        return StoredTensor(self.name, self.file, self.encoding, (num_rows, num_inputs), data)

    def read_into(self, out: Float32Array) -> None:
        """Decode the matrix to float32. Invalid: a value is not finite."""
        self.rows(0, self.shape[0]).read_into(out)

    def _of_inputs(self, table: Float32Array) -> Float32Array:
        """Return the number of each input, of a table with a column for each column of blocks."""
        if self.groups is not None:
            return np.take(table, self.groups, axis=1)
        return np.repeat(table, self.block[1], axis=1)[:, : self.shape[1]]

    def _zeros(self, at: npt.NDArray[np.int64]) -> Float32Array | None:
        """Return the zeros of these rows of blocks. None: all are `zero`."""
        if self.zeros is None:
            return None
        zeros: Float32Array = self.zeros.rows(int(at[0]), int(at[-1]) + 1)[at - at[0]].astype(np.float32)
        if self.zero is None:
            return zeros
        if not np.all(zeros == self.zero):
            raise Invalid(
                f"{self.file}: {self.name} has other zeros than {self.zero}, and the configuration says that it is "
                "symmetric: the file is damaged, or has another format"
            )
        return None
