"""Files that are worth having in memory before they are needed: because somebody said so, opened them, or usually comes
back about now.

A hint takes free frames, and those of files that were not used for a while; it never waits, nor has anybody wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from kvfs.pages.frames import NOWHERE
from kvfs.pages.pool import NO_ROW, PagePool
from kvfs.pages.table import PageTable
from kvfs.tiers.departures import Departures
from kvfs.tiers.moves import Moves
from kvfs.tiers.residents import Residents
from libsym.errors import SymError

LIVES_S = 10.0
"""What found no room for so long is forgotten."""
UNUSED_S = 1.0
"""What was not used for so long may go down for a hint."""
MAX_HINTS = 1024

Ask = Callable[[PageTable, Callable[[SymError | None], None]], None]
"""Has a file's pages read, pinned until what is given is told; there are as many free frames."""


class Hints:
    """All of one pool."""

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
        self._wanted: dict[PageTable, float] = {}  # and since when
        self._reading: dict[PageTable, PageTable] = {}  # and what holds its pages meanwhile
        self._returns: list[tuple[float, int, int]] = []  # a heap: when, the row, its uses until then
        self.num_begun = 0

    def __len__(self) -> int:
        return len(self._wanted)

    def add(self, table: PageTable) -> None:
        """It is worth having in memory."""
        self._residents.wanted_s[table.row] = self._clock()
        self._residents.is_cold[table.row] = False
        if self._num_missing(table) and len(self._wanted) < MAX_HINTS:
            self._wanted[table] = self._clock()

    def forget(self, table: PageTable) -> None:
        """It is not, any more."""
        self._wanted.pop(table, None)

    def expect(self, row: int) -> None:
        """A file goes down: if its uses come regularly, it is back before the next."""
        residents = self._residents
        table, expected_s = residents.tables[row], residents.expected_s(row)
        if table is not None and expected_s is not None:
            lead_s = 2 * self._moves.bring_s * len(table.pages)
            heapq.heappush(self._returns, (expected_s - lead_s, row, int(residents.num_uses[row])))

    @property
    def next_s(self) -> float:
        """When there is something to do, if nothing else happens."""
        return self._returns[0][0] if self._returns else float("inf")

    def note_returns(self) -> None:
        """Files whose time has come."""
        now_s, residents = self._clock(), self._residents
        while self._returns and self._returns[0][0] <= now_s:
            _, row, num_uses = heapq.heappop(self._returns)
            table = residents.tables[row]
            if table is not None and residents.num_uses[row] == num_uses and not residents.is_cold[row]:
                self.add(table)

    def advance(self) -> None:
        """Nobody waits: what there is room for is read."""
        now_s = self._clock()
        for table, since_s in list(self._wanted.items()):
            if table.closed or table.row == NO_ROW or now_s - since_s > LIVES_S:
                del self._wanted[table]
            elif table not in self._reading and not self._begin(table):
                break

    def _begin(self, table: PageTable) -> bool:
        """False: there is no room for it now."""
        if not self._make_room(table):
            return False
        del self._wanted[table]
        fork = self._reading[table] = table.fork()  # nobody frees the pages meanwhile
        self.num_begun += 1
        self._ask(fork, lambda _error: self._reading.pop(table).close())
        return True

    def _make_room(self, table: PageTable) -> bool:
        pool, departures = self._pool, self._departures
        short = self._num_missing(table) - pool.store.num_free + pool.low_water
        if short <= 0:
            return True
        found = departures.victims(table.pages)
        rows = pool.row_of[found]
        used_s = np.where(rows == NO_ROW, pool.last_use[found], self._residents.used_s(rows))
        found = found[self._clock() - used_s > UNUSED_S]
        if found.size < short or departures.is_grace(found[:short]):
            return False
        departures.send(found[:short])
        return self._num_missing(table) <= pool.store.num_free

    def _num_missing(self, table: PageTable) -> int:
        return int(np.count_nonzero(self._pool.store.of[table.pages] == NOWHERE))

    def held(self) -> list[PageTable]:
        """What it refers to pages with, for the books."""
        return list(self._reading.values())
