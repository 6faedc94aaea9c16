"""Pages that go down: what is on disk as it is loses its frame at once, the rest when it is written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import NO_ROW, PagePool
from kvfs.tiers.candidates import candidates, in_order
from kvfs.tiers.moves import Moves
from kvfs.tiers.policy import Files, FloatArray, Gaps, Rank
from kvfs.tiers.residents import Residents
from kvfs.tiers.tickets import Engine, Pressure
from libsym.errors import SymError

CLEAN_SHARE = 8
"""With less than this part of memory free, what would go down next is written before it has to."""
CLEANED_AT_ONCE = 64
FULL_FOR_S = 0.05
"""Where nothing could go down, it is not looked again before."""
TELLS_EACH_S = 0.25


class Departures:
    """Departures of a pool."""

    def __init__(
        self,
        pool: PagePool,
        residents: Residents,
        moves: Moves,
        clock: Callable[[], float],
        went: Callable[[int], None],
        engine: Callable[[], Engine],
        pressure: Callable[[], Pressure],
    ) -> None:
        """`went`: pages of a file, by its row, are about to leave memory for the first time since its last use."""
        self._pool = pool
        self._residents = residents
        self._moves = moves
        self._clock = clock
        self._went = went
        self._engine, self._pressure = engine, pressure
        self._rank: Rank = least_recent
        self.max_kept_share = 0.5
        """Of memory, that advice may keep there."""
        self.going: dict[int, float] = {}
        """Pages that are being written to lose their frame, and since when."""
        self.num_dropped = 0
        self.grace_until_s = 0.0
        """Programs were told that files of theirs would go, and have until then."""
        self._told: frozenset[int] = frozenset()
        """Accounts of those files."""
        self._cleaning: set[int] = set()
        self._told_at_s = self._idled_at_s = -1e9
        self._full_until_s = 0.0

    def use(self, rank: Rank) -> None:
        """Rank files by another policy from now on."""
        self._rank = rank

    def victims(self, keep: IntArray, num_wanted: int | None = None) -> IntArray:
        """Pages that may go, the first to go first, no more than are wanted; `keep`: not these."""
        pool, engine, now_s = self._pool, self._engine(), self._clock()
        if now_s - self._idled_at_s > TELLS_EACH_S:
            self._idled_at_s = now_s
            engine.idle_out()
        found = candidates(pool)
        if keep.size:
            found = found[~np.isin(found, keep)]
        if self._moves.recent_error() is not None:
            found = found[pool.on_disk.is_kept(found, pool.computed(found))]  # the disk takes nothing else
        return in_order(
            pool,
            self._residents,
            found,
            self._rank,
            now_s,
            self._moves.bring_s,
            engine.compute_s,
            self.max_kept,
            num_wanted,
        )

    @property
    def max_kept(self) -> int:
        """Pages that advice may keep in memory."""
        return int(self._pool.num_frames * self.max_kept_share)

    def is_grace(self, pages: IntArray) -> bool:
        """Before they go: whether programs are told, and have some time."""
        now_s = self._clock()
        if now_s < self.grace_until_s:
            return True
        if not pages.size or now_s - self._told_at_s < TELLS_EACH_S:
            return False
        rows = dict.fromkeys(self._pool.row_of[pages].tolist())  # what goes first comes first
        tables = [table for row in rows if (table := self._residents.table_of(row)) is not None]
        grace_s = self._pressure().tell(tables, int(pages.size))
        if not grace_s:
            return False
        self.grace_until_s = self._told_at_s = now_s + grace_s  # and then some pages go, whatever programs do
        self._told = frozenset(table.owner for table in tables if table is not None)
        return True

    def has_grace(self, owner: int) -> bool:
        """Whether files of an account were named, and are not taken yet."""
        return owner in self._told and self._clock() < self.grace_until_s

    def may_go(self, pages: IntArray) -> IntArray:
        """Return the pages that are in memory, and that nothing needs there."""
        pool = self._pool
        is_here = (pool.store.of[pages] != NOWHERE) & (pool.pins[pages] == 0)
        found: IntArray = pages[is_here & (pool.computed(pages) > 0)]
        return found

    def send(self, pages: IntArray) -> int:
        """Take the pages' frames away; return how many have lost theirs at once."""
        pool = self._pool
        is_clean = pool.on_disk.is_kept(pages, pool.computed(pages))
        self._drop(pages[is_clean])
        dirty = pages[~is_clean]
        if dirty.size:
            self.going |= dict.fromkeys(dirty.tolist(), self._clock())
            self._write(dirty)
        return int(np.count_nonzero(is_clean))

    def keep_some_free(self) -> None:
        """Keep some frames free, so that a call that needs a page gets it at once."""
        pool, now_s = self._pool, self._clock()
        short = pool.core.low_water - pool.store.free.count - len(self.going)
        if short > 0 and now_s >= self._full_until_s:
            taken = self.victims(_NONE, short + pool.core.low_water)
            if not taken.size:
                self._full_until_s = now_s + FULL_FOR_S
            elif not self.is_grace(taken):
                self.send(taken)

    def clean_ahead(self) -> None:
        """Write what would go down next, while nobody waits for it."""
        pool = self._pool
        if self._cleaning or self._moves.num_jobs or pool.store.free.count * CLEAN_SHARE > pool.num_frames:
            return
        found = self.victims(_NONE, pool.num_frames // CLEAN_SHARE)
        dirty = found[~pool.on_disk.is_kept(found, pool.computed(found))][:CLEANED_AT_ONCE]
        if dirty.size:
            self._cleaning.update(dirty.tolist())
            self._write(dirty)

    def _drop(self, pages: IntArray) -> None:
        if not pages.size:
            return
        pool, went_down = self._pool, self._residents.went_down
        pool.drop_frames(pages)
        self.num_dropped += pages.size
        rows = pool.row_of[pages]
        for row, num in zip(*np.unique(rows[rows != NO_ROW], return_counts=True), strict=True):
            if not went_down[row]:
                self._went(int(row))
            went_down[row] += num

    def _write(self, pages: IntArray) -> None:
        self._pool.pin(pages)
        self._moves.write_out(pages, lambda error: self._is_written(pages, error))

    def _is_written(self, pages: IntArray, error: SymError | None) -> None:
        """Drop the frames of written pages, but for pages that were used meanwhile or that the disk did not take."""
        del error
        pool = self._pool
        pool.unpin(pages)
        since_s = np.array([self.going.pop(page, -1.0) for page in pages.tolist()])  # -1: written ahead
        self._cleaning.difference_update(pages.tolist())
        due = self.may_go(pages[since_s >= pool.last_use[pages]])
        self._drop(due[pool.on_disk.is_kept(due, pool.computed(due))])


def least_recent(files: Files, gaps: Gaps) -> FloatArray:
    """Until a policy is chosen."""
    del gaps
    return -files.idle_s


_NONE: IntArray = np.empty(0, np.int32)
