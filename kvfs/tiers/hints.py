"""Hints: files that should be in memory before they are needed. A program has given advice on the file, or has opened
the file, or the next use of the file is expected about now.

A hint takes free frames, and frames of files that were not used for a while. A hint never waits, and no call waits for
a hint.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import NO_ROW, PagePool
from kvfs.pages.table import PageTable
from kvfs.tiers.departures import Departures
from kvfs.tiers.moves import Moves
from kvfs.tiers.residents import Residents
from libsym.errors import SymError

WANTED_S = 10.0
"""Seconds for which a hint is valid."""
LEAD_S = 0.05
"""Files are read ahead this much earlier than seems necessary, because the disk has other work."""
UNUSED_S = 1.0
"""After this time without use, a file may be evicted for a hint. A file whose next use is expected after the end of the
hint may be evicted, too.
"""
MAX_ASKED = 256
"""The most files for which the time of the next use is looked up. A lookup takes some microseconds."""
MAX_HINTS = 1024

Ask = Callable[[PageTable, Callable[[SymError | None], None]], None]
"""A function that reads a file's pages. The pages stay pinned until the callback is called. The caller has checked that
enough frames are free.
"""


class Hints:
    """Hints of one pool."""

    def __init__(
        self,
        pool: PagePool,
        residents: Residents,
        departures: Departures,
        moves: Moves,
        clock: Callable[[], float],
        ask: Ask,
    ) -> None:
        self._pool = pool
        self._residents = residents
        self._departures = departures
        self._moves = moves
        self._clock = clock
        self._ask = ask
        self._wanted: dict[PageTable, float] = {}  # for each file, the end of its hint
        self._reading: dict[PageTable, PageTable] = {}  # for each file, a fork that keeps its pages referenced
        self._returns: list[tuple[float, int, int, float]] = []
        """A heap of expected uses. Each has its earliest time, the file's row and number of uses so far, and the end of
        the hint.
        """
        self.num_begun = 0

    def __len__(self) -> int:
        return len(self._wanted)

    def add(self, table: PageTable, until_s: float) -> None:
        """Add a hint for a file until its next use, or until `until_s`. Other files are evicted before this file."""
        assert table.row != NO_ROW
        self._residents.wanted_until_s[table.row] = until_s
        self._residents.is_cold[table.row] = False
        if self._num_missing(table) and len(self._wanted) < MAX_HINTS:
            self._wanted[table] = until_s

    def forget(self, table: PageTable) -> None:
        """Drop the hint for a file."""
        self._wanted.pop(table, None)

    def expect(self, row: int) -> None:
        """Plan a hint for a file that is being evicted, if its uses come regularly. The file is then read before its
        next use.
        """
        residents = self._residents
        table, expected_s = residents.table_of(row), residents.expected_s(row)
        if table is not None and expected_s is not None:
            first_s, last_s = expected_s
            lead_s = LEAD_S + 2 * self._moves.bring_s * len(table.pages)
            heapq.heappush(self._returns, (first_s - lead_s, row, int(residents.num_uses[row]), last_s + lead_s))

    @property
    def next_s(self) -> float:
        """The time of the next planned hint."""
        return self._returns[0][0] if self._returns else float("inf")

    def note_returns(self) -> None:
        """Add the planned hints whose time has come."""
        now_s, residents = self._clock(), self._residents
        while self._returns and self._returns[0][0] <= now_s:
            _, row, num_uses, until_s = heapq.heappop(self._returns)
            table = residents.table_of(row)
            if table is not None and residents.num_uses[row] == num_uses and not residents.is_cold[row]:
                self.add(table, until_s)

    def advance(self) -> None:
        """Read files ahead while there is room."""
        now_s = self._clock()
        for table, until_s in list(self._wanted.items()):
            if table.closed or table.row == NO_ROW or now_s > until_s:
                del self._wanted[table]
            elif table not in self._reading and not self._begin(table, until_s):
                break

    def _begin(self, table: PageTable, until_s: float) -> bool:
        """Begin to read a file. False: there is no room now."""
        if not self._make_room(table, until_s):
            return False
        del self._wanted[table]
        fork = self._reading[table] = table.fork()  # keeps the pages referenced
        self.num_begun += 1
        self._ask(fork, lambda _error: self._reading.pop(table).close())
        return True

    def _make_room(self, table: PageTable, until_s: float) -> bool:
        """Evict files that are expected to be used later than `table`, or that have not been used for a while."""
        pool, departures = self._pool, self._departures
        short = self._num_missing(table) - pool.store.free.count + pool.core.low_water
        if short <= 0:
            return True
        found = departures.victims(table.pages)
        found = found[self._may_give_way(found, until_s)][:short]
        if found.size < short or departures.is_grace(found):
            return False
        departures.send(found)
        return self._num_missing(table) <= pool.store.free.count

    def _may_give_way(self, pages: IntArray, until_s: float) -> npt.NDArray[np.bool_]:
        """Return which pages were not used for a while, or are expected to be used only after `until_s`."""
        pool, residents, now_s = self._pool, self._residents, self._clock()
        rows = pool.row_of[pages]
        has_row = rows != NO_ROW
        is_idle = now_s - pool.last_use[pages] > UNUSED_S
        is_idle[has_row] = now_s - residents.last_use_s[rows[has_row]] > UNUSED_S
        is_later = np.zeros(residents.num_rows, np.bool_)
        for row in np.unique(rows[has_row & ~is_idle])[:MAX_ASKED].tolist():
            expected_s = residents.expected_s(row)
            is_later[row] = expected_s is not None and expected_s[0] > until_s
        is_idle[has_row] |= is_later[rows[has_row]]
        is_idle[has_row] &= residents.wanted_until_s[rows[has_row]] <= now_s
        return is_idle

    def _num_missing(self, table: PageTable) -> int:
        return int(np.count_nonzero(self._pool.store.of[table.pages] == NOWHERE))

    def held(self) -> list[PageTable]:
        """Return the tables that refer to pages for hints, for the audit."""
        return list(self._reading.values())
