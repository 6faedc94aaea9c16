"""What attention reads of decodes, laid out on the host; for the next pass while the device computes this one.

Most passes of decodes are the one before with one entry more in every file. So before the host waits for the logits, it
finds places for the arrays of such a pass, fills in the page tables, and finds the groups. A page that a file goes on
to has no frame yet: it is a hole. The next pass compares its frames with those that were expected, and lays out what
differs: the holes, frames that have moved, other files. If the tables have another shape it lays out everything.
Positions, entries and lengths are laid out then: it takes no longer than to compare them.
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
    """Tables that are laid out, of a pass that may come."""

    laid: Laid
    counts: Counts
    """Pages of each row."""
    frames: IntArray
    """Of all rows, one after the other."""


class DecodeLayout:
    """Lays out passes of decodes alone."""

    def __init__(self, device: Device) -> None:
        # Graphs have addresses in them: this one never grows.
        self.staging = Staging(device, MAX_SPLITS * SPLIT_PAGES + MAX_DECODES * 16)
        self.num_late = 0
        """Pages that were put into tables after their pass had begun."""
        self._expected: _Expected | None = None
        nobody = np.empty((0, 0), np.int32), np.empty(0, np.int32)
        self._grouped = (*nobody, find_groups(*nobody))
        """The last tables, the whole splits of their rows, and the groups that were found."""

    def lay(self, work: Pass, frames: IntArray) -> Laid:
        """Places for the arrays of a pass, with the page tables filled in; `frames`: those of its pages."""
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
        """Fill in lengths, and who shares a prefix by the tables that are laid out; whether somebody does."""
        host, count = laid.host, len(work.decodes)
        fill(host["lengths"], (work.starts[:count] + 1).astype(np.int32), 0)
        first, rows, splits, row_splits = self._groups(host["tables"][:count], host["lengths"][:count])
        fill(host["group_first"], first, len(rows))
        fill(host["group_rows"], rows, 0)
        fill(host["group_splits"], splits, 0)
        fill(host["row_splits"], row_splits, 0)
        return len(splits) > 0

    def expect(self, work: Pass, frames: IntArray) -> None:
        """Lay out the pass after this one as if every file grew by an entry."""
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
        """Who shares what; found anew when a whole split has been added, or others have come."""
        whole_splits = lengths // (SPLIT_PAGES * PAGE_ENTRIES)
        old, old_splits, groups = self._grouped
        if tables.shape == old.shape and np.array_equal(whole_splits, old_splits):
            is_beyond = np.arange(tables.shape[1]) >= SPLIT_PAGES * whole_splits[:, None]
            if ((tables == old) | is_beyond).all():
                return groups
        self._grouped = (tables.copy(), whole_splits, find_groups(tables, lengths))
        return self._grouped[2]


def decode_arrays(num_rows: int, table_pages: int) -> dict[str, tuple[int, ...]]:
    """The arrays of a pass' decodes, and their shapes."""
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
    """Fill in as many rows as there are counts, from the first frames; the rest is zeros."""
    tables[...] = 0
    tables[: len(counts)][np.arange(tables.shape[1]) < counts[:, None]] = frames[: counts.sum()]
