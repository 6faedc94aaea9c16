"""What is known of files for deciding who stays in memory: a row of numbers for each, by column.

A row is a file's as long as somebody has it. A *use* is a call, or calls that follow each other without a pause that is
worth counting. The time between the end of one and the beginning of the next is a *gap*.

Owned by the daemon's trio thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import isnan

import numpy as np
import numpy.typing as npt

from kvfs.pages.table import PageTable
from kvfs.tiers.policy import FloatArray, Gaps

LEAST_GAP_S = 0.02
"""What is shorter is the same use: a program in Python thinks for a millisecond or two between two tokens."""
_NEWS_SHARE = 0.25
"""Of the last gap in the mean of a file's gaps."""
_FADES_AT = 4096
_SPREADS = 2.0
"""So many mean deviations before the mean hardly any gap has ended: 6 of 100 that are normal, none that are even."""
_REGULAR = 0.75
"""Gaps of which the shortest are no less than a quarter of the usual one can be foreseen."""
_ENOUGH_USES, _ENOUGH_GAPS = 4, 16
"""Before it had so many a file is taken to be like others; before there were so many nothing is."""
_FIRST_ROOM = 256
_UNKNOWN = np.nan


class Residents:
    """The files of one pool."""

    __slots__ = (
        "_clock",
        "_free",
        "_num_gaps",
        "gap_s",
        "gap_spread_s",
        "gaps",
        "is_cold",
        "last_use_s",
        "num_rows",
        "num_users",
        "num_uses",
        "pinned_until_s",
        "priority",
        "tables",
        "wanted_s",
        "went_down",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free: list[int] = []
        self._num_gaps = 0
        self.num_rows = 0
        """Rows that were ever used: no row beyond them."""
        self.tables: list[PageTable | None] = []
        """By row; None: nobody's."""
        self.gaps = Gaps()
        """Of all files."""
        self.last_use_s = np.zeros(_FIRST_ROOM)
        """When its last use ended, or began if it has not."""
        self.num_uses = np.zeros(_FIRST_ROOM)
        self.gap_s = np.full(_FIRST_ROOM, _UNKNOWN)
        self.gap_spread_s = np.full(_FIRST_ROOM, _UNKNOWN)
        self.num_users = np.zeros(_FIRST_ROOM, np.int32)
        """Programs' handles on it."""
        self.priority = np.zeros(_FIRST_ROOM, np.int32)
        self.is_cold = np.zeros(_FIRST_ROOM, np.bool_)
        """It goes before others, by advice, until it is used again."""
        self.pinned_until_s = np.zeros(_FIRST_ROOM)
        """It does not go before."""
        self.wanted_s = np.zeros(_FIRST_ROOM)
        """When somebody said that it will be needed."""
        self.went_down = np.zeros(_FIRST_ROOM, np.int32)
        """Pages that left memory since its last use."""

    def add(self, table: PageTable) -> int:
        """A row for a new file, which is used now."""
        if self._free:
            row = self._free.pop()
        else:
            row, self.num_rows = self.num_rows, self.num_rows + 1
            self.tables.append(None)
            if row == len(self.num_uses):
                self._grow()
        self.tables[row] = table
        self.last_use_s[row] = self._clock()
        self.num_uses[row] = 1
        self.gap_s[row] = self.gap_spread_s[row] = _UNKNOWN
        self.num_users[row] = self.priority[row] = self.went_down[row] = 0
        self.is_cold[row] = False
        self.pinned_until_s[row] = self.wanted_s[row] = 0
        return row

    def remove(self, row: int) -> None:
        """Nobody has the file any more."""
        assert self.tables[row] is not None
        self.tables[row] = None
        self._free.append(row)

    def begin_use(self, row: int) -> float:
        """A call is about to compute with it: how long it was not used, 0 if that is not worth counting."""
        gap_s = self._clock() - float(self.last_use_s[row])
        self.is_cold[row] = False
        self.wanted_s[row] = 0
        self.went_down[row] = 0
        if gap_s < LEAST_GAP_S:
            return 0.0
        self.num_uses[row] += 1
        self.gaps.add(gap_s)
        self._num_gaps += 1
        if self._num_gaps % _FADES_AT == 0:
            self.gaps.fade(0.5)
        mean_s = float(self.gap_s[row])
        if isnan(mean_s):
            self.gap_s[row], self.gap_spread_s[row] = gap_s, _UNKNOWN
        else:
            off_s, spread_s = abs(gap_s - mean_s), float(self.gap_spread_s[row])
            self.gap_spread_s[row] = off_s if isnan(spread_s) else spread_s + _NEWS_SHARE * (off_s - spread_s)
            self.gap_s[row] = mean_s + _NEWS_SHARE * (gap_s - mean_s)
        return gap_s

    def end_use(self, row: int) -> None:
        """Nothing computes with it any more."""
        self.last_use_s[row] = self._clock()

    def expected_s(self, row: int) -> float | None:
        """When its next use may begin, as a rule not before; None: nobody can tell."""
        gap_s, spread_s = float(self.gap_s[row]), float(self.gap_spread_s[row])
        if self.num_uses[row] < _ENOUGH_USES or isnan(spread_s):
            gap_s, spread_s = self._usual_gap()
        if isnan(spread_s) or _SPREADS * spread_s > _REGULAR * gap_s:
            return None
        return float(self.last_use_s[row]) + gap_s - _SPREADS * spread_s

    def _usual_gap(self) -> tuple[float, float]:
        """Of all files; not a number: they have too little in common, or there were too few."""
        if self._num_gaps < _ENOUGH_GAPS:
            return _UNKNOWN, _UNKNOWN
        low_s, middle_s, high_s = (self.gaps.quantile_s(share) for share in (0.05, 0.5, 0.95))
        return middle_s, (high_s - low_s) / (2 * _SPREADS)

    def used_s(self, rows: npt.NDArray[np.integer]) -> FloatArray:
        """When these were used last, or somebody said that they would be."""
        used_s: FloatArray = np.maximum(self.last_use_s[rows], self.wanted_s[rows])
        return used_s

    def _grow(self) -> None:
        for name in (
            "last_use_s", "num_uses", "gap_s", "gap_spread_s", "num_users", "priority", "is_cold", "pinned_until_s",
            "wanted_s", "went_down",
        ):  # fmt: skip
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))
