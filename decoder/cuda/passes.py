"""Passes: parts of a batch that the device has room for. A pass has its decodes first, then its prefills.

Nearly every batch is one pass. A batch becomes several passes if it has more rows than the workspace holds, or more
pages than there are frames. The cuts change no bit, because a row's numbers depend on its own sequence alone.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decoder.batch import Chunk, IntArray
from decoder.checks import CheckedBatch, Words
from decoder.cuda.memory_plan import MAX_DECODES, MAX_ROWS, MAX_SPLITS
from libsym.abi import PAGE_ENTRIES
from libsym.errors import NoSpace
from triton_kernels.attention_splits import SPLIT_PAGES


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A chunk, or some of its rows."""

    chunk: Chunk
    mask: Words | None
    length: int
    pages: IntArray
    """Pages that hold the entries up to the entry of the last row."""

    @classmethod
    def of(cls, chunk: Chunk, mask: Words | None) -> ChunkRows:
        length = len(chunk.tokens)
        return cls(chunk, mask, length, chunk.pages[: -(-(chunk.start + length) // PAGE_ENTRIES)])

    @property
    def is_decode(self) -> bool:
        return self.length == 1 and self.mask is None and self.chunk.mass is None


class Pass:
    """Pieces that are computed together. Their fields are joined to arrays, for speed: host work delays every token."""

    __slots__ = ("counts", "decodes", "lengths", "pages", "pieces", "prefills", "starts")

    def __init__(self, pieces: Sequence[ChunkRows]) -> None:
        decodes = [piece for piece in pieces if piece.is_decode]
        decodes.sort(key=lambda piece: not piece.chunk.rows)
        self.decodes = tuple(decodes)
        """Decodes. First are the decodes whose logits are wanted."""
        self.prefills = tuple(piece for piece in pieces if not piece.is_decode)
        self.pieces = self.decodes + self.prefills
        self.lengths = np.array([piece.length for piece in self.pieces], np.int64)
        self.starts = np.array([piece.chunk.start for piece in self.pieces], np.int64)
        self.counts = np.array([len(piece.pages) for piece in self.pieces], np.int64)
        """Number of pages of each piece."""
        self.pages = np.concatenate([piece.pages for piece in self.pieces]) if self.pieces else _NO_PAGES
        """Pages of all pieces, one piece after the other."""

    def pages_used(self, num_pages: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return `(used, written, blank)`: all pages, pages that the pass writes, and pages without earlier entries."""
        is_used = np.zeros(num_pages, np.bool_)
        is_used[self.pages.astype(np.intp)] = True
        used = np.flatnonzero(is_used).astype(np.int32)
        # No two pieces write the same page.
        return used, self._pages_from(self.starts // PAGE_ENTRIES), self._pages_from(-(-self.starts // PAGE_ENTRIES))

    def _pages_from(self, first: npt.NDArray[np.int64]) -> IntArray:
        """Return the pages of each piece, without the piece's first `first` pages."""
        num_left = self.counts - first
        return self.pages[np.repeat(np.cumsum(self.counts) - num_left, num_left) + _counted(num_left)]

    def entries(self, frames: IntArray) -> IntArray:
        """Return the place of each row's K and V, as frame * 32 + entry. `frames` has the frames of `pages`."""
        entries = np.repeat(self.starts, self.lengths) + _counted(self.lengths)
        first_pages = np.cumsum(self.counts) - self.counts
        page = np.repeat(first_pages, self.lengths) + entries // PAGE_ENTRIES
        where: IntArray = (frames[page] * PAGE_ENTRIES + entries % PAGE_ENTRIES).astype(np.int32)
        return where


def _counted(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers 0, 1, …, count - 1 for each count, one range after the other."""
    first: npt.NDArray[np.int64] = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(first, counts)


def divide(batch: Sequence[Chunk], checked: CheckedBatch, num_frames: int) -> list[Pass]:
    """Return the passes of a batch, in order. NoSpace: a single file has more pages than there are frames."""
    pieces = list(_pieces(batch, checked))
    for piece in pieces:
        if len(piece.pages) > num_frames:
            raise NoSpace(
                f"a file of {len(piece.pages)} pages does not fit the {num_frames} that the GPU has room for: shorten "
                "it, or start the daemon with more --gpu-memory"
            )
    passes = []
    while pieces:
        count = _num_fitting(pieces, num_frames)
        passes.append(Pass(pieces[:count]))
        pieces = pieces[count:]
    return passes


def table_width(num_pages: int) -> int:
    """Return the columns of the decodes' page tables: a power of two, so that there are few captured graphs."""
    return max(MIN_TABLE_PAGES, 1 << (num_pages - 1).bit_length())


def bucket(num_decodes: int) -> int:
    """Return the number of rows that a pass of `num_decodes` decodes is padded to."""
    return BUCKETS[bisect_left(BUCKETS, num_decodes)]


def has_room(num_decodes: int, width: int) -> bool:
    """Return whether tables of this width for `num_decodes` decodes fit into one pass."""
    return bucket(num_decodes) * width <= MAX_SPLITS * SPLIT_PAGES


MIN_TABLE_PAGES = 64
"""Least number of columns in page tables.

Unused columns take no time, so narrower tables need no graphs of their own.
"""
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, MAX_DECODES)


def _pieces(batch: Sequence[Chunk], checked: CheckedBatch) -> Iterator[ChunkRows]:
    for chunk, mask in zip(batch, checked.masks, strict=True):
        length, num_rows = len(chunk.tokens), len(chunk.rows)
        if length <= MAX_ROWS:
            yield ChunkRows.of(chunk, mask)
            continue
        for first in range(0, length, MAX_ROWS):
            end = min(first + MAX_ROWS, length)
            first_wanted = length - num_rows
            some = dataclasses.replace(
                chunk,
                tokens=chunk.tokens[first:end],
                positions=chunk.positions[first:end],
                start=chunk.start + first,
                rows=chunk.rows[max(0, first - first_wanted) : max(0, end - first_wanted)],
                mask=None,
            )
            yield ChunkRows.of(some, None if mask is None else mask[first:end])


def _num_fitting(pieces: Sequence[ChunkRows], num_frames: int) -> int:
    """Return how many of the first pieces fit into one pass. The first piece always fits."""
    rows = num_decodes = width = num_pages = 0
    pages: set[int] = set()
    is_tight = sum(len(piece.pages) for piece in pieces) > num_frames
    for count, piece in enumerate(pieces):
        rows += piece.length
        num_decodes += piece.is_decode
        if piece.is_decode:
            width = max(width, table_width(len(piece.pages)))
        if is_tight:
            pages.update(piece.pages.tolist())
            num_pages = len(pages)
        fits = rows <= MAX_ROWS and num_decodes <= MAX_DECODES and num_pages <= num_frames
        if not fits or (num_decodes and not has_room(num_decodes, width)):
            return max(1, count)
    return len(pieces)


_NO_PAGES = np.empty(0, np.int32)
