"""Files that are worth having in memory before they are needed: because somebody said so, opened them, or usually comes
back about now.

A hint takes free frames, and those of files that were not used for a while; it never waits, nor has anybody wait.
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
"""Seconds that a hint is believed for."""
LEAD_S = 0.05
"""So much earlier than it takes to read them, files are read: the disk has others, too."""
UNUSED_S = 1.0
"""A file that was not used for so long may go down for a hint. One that comes back later than that is needed."""
MAX_ASKED = 256
"""So many files are asked when they come back: some microseconds each."""
MAX_HINTS = 1024

Ask = Callable[[PageTable, Callable[[SymError | None], None]], None]
"""Has a file's pages read, pinned until what is given is told; there are as many free frames."""


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
        self._wanted: dict[PageTable, float] = {}  # and until when
        self._reading: dict[PageTable, PageTable] = {}  # and what holds its pages meanwhile
        self._returns: list[tuple[float, int, int, float]] = []
        """A heap: from when, the row, its uses until then, until when."""
        self.num_begun = 0

    def __len__(self) -> int:
        return len(self._wanted)

    def add(self, table: PageTable, until_s: float) -> None:
        """Want a file in memory, until it is used, or until then: others go before it."""
        assert table.row != NO_ROW
        self._residents.wanted_until_s[table.row] = until_s
        self._residents.is_cold[table.row] = False
        if self._num_missing(table) and len(self._wanted) < MAX_HINTS:
            self._wanted[table] = until_s

    def forget(self, table: PageTable) -> None:
        """Want a file no more."""
        self._wanted.pop(table, None)

    def expect(self, row: int) -> None:
        """A file goes down: if its uses come regularly, it is back before the next."""
        residents = self._residents
        table, expected_s = residents.table_of(row), residents.expected_s(row)
        if table is not None and expected_s is not None:
            first_s, last_s = expected_s
            lead_s = LEAD_S + 2 * self._moves.bring_s * len(table.pages)
            heapq.heappush(self._returns, (first_s - lead_s, row, int(residents.num_uses[row]), last_s + lead_s))

    @property
    def next_s(self) -> float:
        """When there is something to do, if nothing else happens."""
        return self._returns[0][0] if self._returns else float("inf")

    def note_returns(self) -> None:
        """Files whose time has come."""
        now_s, residents = self._clock(), self._residents
        while self._returns and self._returns[0][0] <= now_s:
            _, row, num_uses, until_s = heapq.heappop(self._returns)
            table = residents.table_of(row)
            if table is not None and residents.num_uses[row] == num_uses and not residents.is_cold[row]:
                self.add(table, until_s)

    def advance(self) -> None:
        """Read ahead, for nobody who waits: what there is room for is read."""
        now_s = self._clock()
        for table, until_s in list(self._wanted.items()):
            if table.closed or table.row == NO_ROW or now_s > until_s:
                del self._wanted[table]
            elif table not in self._reading and not self._begin(table, until_s):
                break

    def _begin(self, table: PageTable, until_s: float) -> bool:
        """False: there is no room for it now."""
        if not self._make_room(table, until_s):
            return False
        del self._wanted[table]
        fork = self._reading[table] = table.fork()  # nobody frees the pages meanwhile
        self.num_begun += 1
        self._ask(fork, lambda _error: self._reading.pop(table).close())
        return True

    def _make_room(self, table: PageTable, until_s: float) -> bool:
        """Of files that are not about to be used, and less so than this one."""
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
        """Return the pages that were not used for a while, or are not expected back before then."""
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
        """Return the tables that refer to pages for hints, for the books."""
        return list(self._reading.values())
