"""Layout of the arrays that attention reads for decodes. The host lays out a pass while the device computes another.

Most passes of decodes equal the previous pass, with one entry more in every file. So before the host waits for the
logits, it lays out such a pass: it fills in the page tables, and finds the groups. A page that a file is about to begin
has no frame yet, so its place in the table is a hole. When the next pass comes, the host compares its frames with the
expected frames, and lays out only the differences: holes, frames that moved, other files. If the tables have another
shape, the host lays out everything. Positions, entries and lengths are always laid out, because comparing them would
take as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decoder.batch import IntArray
from decoder.cuda.device import Device
from decoder.cuda.memory_plan import MAX_DECODES, MAX_SPLITS
from decoder.cuda.passes import Pass, bucket, has_room, table_width
from decoder.cuda.staging import Laid, Staging, fill
from libsym.abi import PAGE_ENTRIES
from triton_kernels.attention_splits import SPLIT_PAGES
from triton_kernels.shared_prefix_attention import find_groups

Counts = npt.NDArray[np.int64]

_HOLE = -1


@dataclass(frozen=True, slots=True)
class _Expected:
    """Tables for the pass that is expected next."""

    laid: Laid
    counts: Counts
    """Number of pages of each row."""
    frames: IntArray
    """Frames of all rows, one row after the other."""


class DecodeLayout:
    """Layout of passes that have decodes only."""

    def __init__(self, device: Device) -> None:
        # Captured graphs contain the addresses of this memory, so it must never grow.
        self.staging = Staging(device, MAX_SPLITS * SPLIT_PAGES + MAX_DECODES * 16)
        self.num_late = 0
        """Number of pages that were not in the expected tables, and were filled in after the pass had begun."""
        self._expected: _Expected | None = None
        nobody = np.empty((0, 0), np.int32), np.empty(0, np.int32)
        self._grouped = (*nobody, find_groups(*nobody))
        """Tables and counts of whole splits, and the groups that were last computed from them."""

    def lay(self, work: Pass, frames: IntArray) -> Laid:
        """Return the arrays of a pass, with page tables filled in. `frames` has the frames of the pass's pages."""
        expected, self._expected = self._expected, None
        if expected is None or not np.array_equal(work.counts, expected.counts):
            self.num_late += len(frames)
            return self._lay(work.counts, frames)
        late = np.flatnonzero(frames != expected.frames)
        ends = np.cumsum(work.counts)
        rows = np.searchsorted(ends, late, side="right")
        expected.laid.host["tables"][rows, late - (ends - work.counts)[rows]] = frames[late]
        self.num_late += len(late)
        return expected.laid

    def lay_groups(self, laid: Laid, work: Pass) -> bool:
        """Fill in lengths, and the groups of rows whose tables share a prefix. Return whether there are groups."""
        host, count = laid.host, len(work.decodes)
        fill(host["lengths"], (work.starts[:count] + 1).astype(np.int32), 0)
        first, rows, splits, row_splits = self._groups(host["tables"][:count], host["lengths"][:count])
        fill(host["group_first"], first, len(rows))
        fill(host["group_rows"], rows, 0)
        fill(host["group_splits"], splits, 0)
        fill(host["row_splits"], row_splits, 0)
        return len(splits) > 0

    def expect(self, work: Pass, frames: IntArray) -> None:
        """Lay out the next pass ahead, as if every file grew by one entry."""
        ends = work.starts + 1
        grows = ends % PAGE_ENTRIES == 0
        counts = work.counts + grows
        if has_room(len(counts), table_width(int(counts.max()))):
            frames = np.insert(frames, np.cumsum(work.counts)[grows], _HOLE)
            laid = self._lay(counts, frames)
            self._groups(laid.host["tables"][: len(counts)], (ends + 1).astype(np.int32))
            self._expected = _Expected(laid, counts, frames)

    def _lay(self, counts: Counts, frames: IntArray) -> Laid:
        laid = self.staging.lay(decode_arrays(bucket(len(counts)), table_width(int(counts.max()))))
        lay_tables(laid.host["tables"], counts, frames)
        return laid

    def _groups(self, tables: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Return the groups of rows that share a prefix.

        If the whole splits have the same pages as in the last call, return the groups of that call.
        """
        whole_splits = lengths // (SPLIT_PAGES * PAGE_ENTRIES)
        old, old_splits, groups = self._grouped
        if tables.shape == old.shape and np.array_equal(whole_splits, old_splits):
            is_beyond = np.arange(tables.shape[1]) >= SPLIT_PAGES * whole_splits[:, None]
            if ((tables == old) | is_beyond).all():
                return groups
        self._grouped = (tables.copy(), whole_splits, find_groups(tables, lengths))
        return self._grouped[2]


def decode_arrays(num_rows: int, table_pages: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays for a pass's decodes, by name."""
    return {
        "tokens": (num_rows,),
        "positions": (num_rows,),
        "entries": (num_rows,),
        "lengths": (num_rows,),
        "row_splits": (num_rows,),
        "group_first": (num_rows // 2 + 1,),
        "group_rows": (num_rows,),
        "group_splits": (num_rows // 2,),
        "tables": (num_rows, table_pages),
    }


def lay_tables(tables: IntArray, counts: Counts, frames: IntArray) -> None:
    """Fill in the first rows: row i gets the next `counts[i]` frames. The rest of the tables becomes zero."""
    tables[...] = 0
    tables[: len(counts)][np.arange(tables.shape[1]) < counts[:, None]] = frames[: counts.sum()]
