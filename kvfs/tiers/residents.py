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

from kvfs.pages.table import PageTable
from kvfs.tiers.policy import Gaps

LEAST_GAP_S = 0.02
"""What is shorter is the same use: a program in Python thinks for a millisecond or two between two tokens."""
_NEWS_SHARE = 0.25
"""Of the last gap in the mean of a file's gaps."""
_FADES_AT = 4096
_REGULAR = 3.0
"""Gaps of which the longest is no longer than so many of the shortest can be foreseen."""
NUM_LATEST = 8
"""Of a file's gaps, these tell of the next. One of four may be unlike the others."""
_ENOUGH_OWN, _ENOUGH_GAPS = 3, 8
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
        "latest_gaps_s",
        "num_rows",
        "num_users",
        "num_uses",
        "pinned_until_s",
        "priority",
        "tables",
        "wanted_until_s",
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
        self.latest_gaps_s = np.full((_FIRST_ROOM, NUM_LATEST), _UNKNOWN)
        """In no order."""
        self.num_users = np.zeros(_FIRST_ROOM, np.int32)
        """Programs' handles on it."""
        self.priority = np.zeros(_FIRST_ROOM, np.int32)
        self.is_cold = np.zeros(_FIRST_ROOM, np.bool_)
        """It goes before others, by advice, until it is used again."""
        self.pinned_until_s = np.zeros(_FIRST_ROOM)
        """It does not go before."""
        self.wanted_until_s = np.zeros(_FIRST_ROOM)
        """Until then it is likely to be needed: others go before it."""
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
        self.gap_s[row] = self.gap_spread_s[row] = self.latest_gaps_s[row] = _UNKNOWN
        self.num_users[row] = self.priority[row] = self.went_down[row] = 0
        self.is_cold[row] = False
        self.pinned_until_s[row] = self.wanted_until_s[row] = 0
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
        self.wanted_until_s[row] = 0
        self.went_down[row] = 0
        if gap_s < LEAST_GAP_S:
            return 0.0
        self.num_uses[row] += 1
        self.gaps.add(gap_s)
        self._num_gaps += 1
        if self._num_gaps % _FADES_AT == 0:
            self.gaps.fade(0.5)
        self.latest_gaps_s[row, int(self.num_uses[row]) % NUM_LATEST] = gap_s
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

    def expected_s(self, row: int) -> tuple[float, float] | None:
        """When its next use begins, as a rule: not before, and not after. None: nobody can tell."""
        window = _window(sorted(gap_s for gap_s in self.latest_gaps_s[row].tolist() if gap_s == gap_s)) or self._usual()  # noqa: PLR0124
        if window is None:
            return None
        last_use_s = float(self.last_use_s[row])
        return last_use_s + window[0], last_use_s + window[1]

    def _usual(self) -> tuple[float, float] | None:
        """Of all files. None: they have too little in common, or there were too few."""
        if self._num_gaps < _ENOUGH_GAPS:
            return None
        low_s, high_s = self.gaps.quantile_s(0.1) / Gaps.BUCKET_RATIO, self.gaps.quantile_s(0.9)  # of the whole buckets
        return (low_s, high_s) if low_s * _REGULAR >= high_s else None

    def _grow(self) -> None:
        for name in (
            "last_use_s", "num_uses", "gap_s", "gap_spread_s", "num_users", "priority", "is_cold", "latest_gaps_s",
            "pinned_until_s", "wanted_until_s", "went_down",
        ):  # fmt: skip
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))


def _window(gaps_s: list[float]) -> tuple[float, float] | None:
    """What gaps that are alike lie between; None: they are not, or too few."""
    if len(gaps_s) < _ENOUGH_OWN:
        return None
    middle_s = gaps_s[len(gaps_s) // 2]
    alike = [gap_s for gap_s in gaps_s if middle_s <= gap_s * 2 <= middle_s * 4]
    if 4 * len(alike) < 3 * len(gaps_s) or alike[-1] > _REGULAR * alike[0]:
        return None
    return alike[0], alike[-1]
