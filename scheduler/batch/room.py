"""Room for what a call's stretch appends, and maybe for some more entries, which a run may grow the file by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decoder.batch import IntArray
from kvfs.fs import FileSystem
from kvfs.pages.table import Reservation
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, NoSpace, OverQuota
from scheduler.batch.call import FileCall

AHEAD_ENTRIES = 64
"""Entries reserved beyond the next for a file that a run may grow: a run ends when they are used up."""
AHEAD_POOL_SHARE = 16
"""With less than this part of the pool free, only what is left of a file's last page is reserved ahead."""


@dataclass(slots=True)
class Room:
    """What calls may have."""

    fs: FileSystem
    max_positions: int
    max_entries: int | None
    """Of a file that a call appends to: what the decoder can have before it at a time."""
    has_runs: bool = False
    """Whether steps may follow each other in C: known with the decoder."""

    def reserve(self, call: FileCall) -> Reservation:
        """For its present stretch. NoSpace, OverQuota: there is none. Invalid: its positions don't fit."""
        num_entries = call.file.table.length + len(call.tokens)
        if self.max_entries is not None and num_entries > self.max_entries:
            raise NoSpace(
                f"a file of {num_entries} entries does not fit the GPU, which has room for {self.max_entries}: start "
                "the daemon with more --gpu-memory"
            )
        positions = self._positions(call)
        ahead = self._num_ahead(call, int(positions[-1]) + 1)
        if ahead:
            last = int(positions[-1])
            more = np.arange(last + 1, last + 1 + ahead, dtype=np.int32)
            tokens = np.concatenate((call.tokens, np.zeros(ahead, np.int32)))
            try:
                return self.fs.reserve(call.file, tokens, np.concatenate((positions, more)))
            except (NoSpace, OverQuota):
                pass  # then as many as are asked for, or nothing
        return self.fs.reserve(call.file, call.tokens, positions)

    def _num_ahead(self, call: FileCall, next_position: int) -> int:
        """Entries to reserve beyond a stretch's: for a run, if there may be one."""
        if not self.has_runs or call.hot is None:
            return 0
        length = call.file.table.length + len(call.tokens)
        ahead = -length % PAGE_ENTRIES
        if self.fs.pool.num_free * AHEAD_POOL_SHARE > self.fs.pool.num_pages:
            ahead += AHEAD_ENTRIES
        return max(0, min(ahead, self.max_positions - next_position))

    def _positions(self, call: FileCall) -> IntArray:
        """Those that were given; else they go on after the last entry's."""
        if call.positions is not None:
            return call.positions
        first = call.file.table.next_position
        end = first + len(call.tokens)
        if end > self.max_positions:
            raise Invalid(
                f"{len(call.tokens)} tokens from position {first} on end at {end}, "
                f"beyond the model's context of {self.max_positions}: truncate the file, or give positions"
            )
        return np.arange(first, end, dtype=np.int32)
