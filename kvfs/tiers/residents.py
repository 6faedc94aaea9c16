"""Residents: files that programs have open. Each file has a row of numbers, by which the tiers decide which files stay
in memory.

A file has a row as long as it has a user. A *use* is a call, or several calls with pauses too short to count. The time
from the end of one use to the beginning of the next is a *gap*.

Owned by the daemon's trio thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs._pages import ffi, lib
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from kvfs.tiers.policy import FloatArray, Gaps

_FADES_AT = 4096
_REGULAR = 3.0
"""Gaps are regular, and so predict the next gap, if the longest gap is at most this many times the shortest gap."""
_ENOUGH_OWN, _ENOUGH_GAPS = 3, 8
"""A prediction needs `_ENOUGH_OWN` gaps of the file itself, or `_ENOUGH_GAPS` gaps of all files together."""


class Residents:
    """The files of one pool. The columns are `row_columns` of `kvfs/core/columns.h`."""

    __slots__ = (
        "_clock",
        "_gaps",
        "_num_gaps",
        "_pool",
        "_see",
        "_tables",
        "gap_s",
        "gap_spread_s",
        "is_cold",
        "last_use_s",
        "latest_gaps_s",
        "num_users",
        "num_uses",
        "pinned_until_s",
        "priority",
        "wanted_until_s",
        "went_down",
    )

    def __init__(
        self,
        pool: PagePool,
        clock: Callable[[], float] = time.monotonic,
        see: Callable[[Any], PageTable] | None = None,
    ) -> None:
        """`see` makes the table of a branch that only the core has. None: the core makes no branches."""
        self._pool = pool
        self._clock = clock
        self._see = see
        self._num_gaps = 0
        self._tables: dict[int, PageTable] = {}
        """Page tables by row."""
        self._gaps = Gaps()
        rows = pool.rows
        self.last_use_s: FloatArray = rows["last_use_s"]
        self.num_uses: FloatArray = rows["num_uses"]
        self.gap_s: FloatArray = rows["gap_s"]
        self.gap_spread_s: FloatArray = rows["gap_spread_s"]
        self.latest_gaps_s: FloatArray = rows["latest_gaps_s"]
        self.num_users: npt.NDArray[np.int32] = rows["num_users"]
        self.priority: npt.NDArray[np.int32] = rows["priority"]
        self.is_cold: npt.NDArray[np.bool_] = rows["is_cold"]
        self.pinned_until_s: FloatArray = rows["pinned_until_s"]
        self.wanted_until_s: FloatArray = rows["wanted_until_s"]
        self.went_down: npt.NDArray[np.int32] = rows["went_down"]

    @property
    def num_rows(self) -> int:
        """Number of rows that were ever used. Rows from here on are untouched."""
        return int(self._pool.core.num_rows)

    def add(self, table: PageTable) -> int:
        """Give a new file a row, and return the row. This counts as a use of the file."""
        core = self._pool.core
        if lib.core_row_new(table.core, self._clock()) != lib.CORE_DONE:
            self._pool.rows.grow(2 * core.row_room)
            core.row_room *= 2
            lib.core_row_new(table.core, self._clock())
        row = table.row
        self._tables[row] = table
        return row

    def has(self, table: PageTable) -> None:
        """Note a file to which the core has given a row."""
        self._tables[table.row] = table

    def table_of(self, row: int) -> PageTable | None:
        """Return the table of the file in a row. None: the row is unused."""
        found = self._tables.get(row)
        if found is None and self._see is not None and (address := int(self._pool.rows["table"][row])):
            found = self._see(ffi.cast("core_table *", address))
        return found

    def remove(self, table: PageTable) -> None:
        """Remove a file that has lost its last user. The file's table still has its pages. The file's source inherits
        shared pages.
        """
        del self._tables[table.row]
        lib.core_row_remove(table.core)

    def begin_use(self, row: int) -> float:
        """Note that a call is about to compute with the file. Return the gap before this use; 0: the gap was too short
        to count.
        """
        gap_s = float(lib.core_begin_use(self._pool.core, row, self._clock()))
        if gap_s:
            self._add_gap(gap_s)
        return gap_s

    @property
    def gaps(self) -> Gaps:
        """Gaps between uses, of all files."""
        core = self._pool.core
        for at in range(core.num_gaps):
            self._add_gap(core.gaps_s[at])
        core.num_gaps = 0
        return self._gaps

    def _add_gap(self, gap_s: float) -> None:
        self._gaps.add(gap_s)
        self._num_gaps += 1
        if self._num_gaps % _FADES_AT == 0:
            self._gaps.fade(0.5)

    def end_use(self, row: int) -> None:
        """Note that the last call that computed with the file has ended."""
        self.last_use_s[row] = self._clock()

    def expected_s(self, row: int) -> tuple[float, float] | None:
        """Return the earliest and the latest time at which the next use is expected. None: unknown."""
        window = _window(sorted(filter(None, self.latest_gaps_s[row].tolist()))) or self._usual()
        if window is None:
            return None
        last_use_s = float(self.last_use_s[row])
        return last_use_s + window[0], last_use_s + window[1]

    def _usual(self) -> tuple[float, float] | None:
        """Return the usual shortest and longest gap of all files. None: the gaps differ too much, or are too few."""
        gaps = self.gaps
        if self._num_gaps < _ENOUGH_GAPS:
            return None
        # `quantile_s` returns the longest gap of a bucket. `low_s` is the shortest gap of its bucket.
        low_s, high_s = gaps.quantile_s(0.1) / Gaps.BUCKET_RATIO, gaps.quantile_s(0.9)
        return (low_s, high_s) if low_s * _REGULAR >= high_s else None


def _window(gaps_s: list[float]) -> tuple[float, float] | None:
    """Return the shortest and the longest of these gaps. None: the gaps differ too much, or are too few."""
    if len(gaps_s) < _ENOUGH_OWN:
        return None
    middle_s = gaps_s[len(gaps_s) // 2]
    alike = [gap_s for gap_s in gaps_s if middle_s <= gap_s * 2 <= middle_s * 4]
    if 4 * len(alike) < 3 * len(gaps_s) or alike[-1] > _REGULAR * alike[0]:
        return None
    return alike[0], alike[-1]
