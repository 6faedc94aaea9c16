"""Evictions: a clean page, which is on disk as it is, loses its frame at once. A dirty page is written first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvfs._pages import lib
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
"""If less than 1 / CLEAN_SHARE of memory is free, the next pages to evict are written ahead."""
CLEANED_AT_ONCE = 64
FULL_FOR_S = 0.05
"""Seconds before the next search for pages to evict, if the last search found none."""
TELLS_EACH_S = 0.25


class Departures:
    """The evictions of one pool."""

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
        """`went` is called with a file's row at the first eviction of any of its pages after a use."""
        self._pool = pool
        self._residents = residents
        self._moves = moves
        self._clock = clock
        self._went = went
        self._engine, self._pressure = engine, pressure
        self._rank: Rank = least_recent
        self.max_kept_share = 0.5
        """Maximum share of memory for pages that advice keeps in memory."""
        self.going: dict[int, float] = {}
        """Pages that lose their frames as soon as they are written, each with the time when its write began."""
        self.num_dropped = 0
        self.grace_until_s = 0.0
        """End of the grace period of programs that were told that their files would be evicted."""
        self._told: frozenset[int] = frozenset()
        """Accounts of the files in the present grace period."""
        self._cleaning: set[int] = set()
        self._told_at_s = self._idled_at_s = -1e9
        self._full_until_s = 0.0

    def use(self, rank: Rank) -> None:
        """Rank files by another policy from now on."""
        self._rank = rank

    def victims(self, keep: IntArray, num_wanted: int | None = None) -> IntArray:
        """Return `num_wanted` pages that may be evicted, in the order of eviction, without the pages in `keep`."""
        pool, engine, now_s = self._pool, self._engine(), self._clock()
        if now_s - self._idled_at_s > TELLS_EACH_S:
            self._idled_at_s = now_s
            engine.idle_out()
        found = candidates(pool)
        if keep.size:
            found = found[~np.isin(found, keep)]
        if self._moves.recent_error() is not None:
            found = found[pool.on_disk.is_kept(found, pool.computed(found))]  # clean pages: the disk refuses writes
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
        """The most pages that advice may keep in memory."""
        return int(self._pool.num_frames * self.max_kept_share)

    def is_grace(self, pages: IntArray) -> bool:
        """Tell programs that these pages are about to be evicted. Return whether a grace period runs."""
        now_s = self._clock()
        if now_s < self.grace_until_s:
            return True
        if not pages.size or now_s - self._told_at_s < TELLS_EACH_S:
            return False
        rows = dict.fromkeys(self._pool.row_of[pages].tolist())  # each row once, in the order of eviction
        tables = [table for row in rows if (table := self._residents.table_of(row)) is not None]
        grace_s = self._pressure().tell(tables, int(pages.size))
        if not grace_s:
            return False
        self.grace_until_s = self._told_at_s = now_s + grace_s  # after that, pages are evicted in any case
        self._told = frozenset(table.owner for table in tables if table is not None)
        return True

    def has_grace(self, owner: int) -> bool:
        """Return whether files of an account were named in a grace period that still runs."""
        return owner in self._told and self._clock() < self.grace_until_s

    def may_go(self, pages: IntArray) -> IntArray:
        """Return those of the pages that are in memory and that no call or job needs in memory."""
        pool = self._pool
        is_here = (pool.store.of[pages] != NOWHERE) & (pool.pins[pages] == 0)
        found: IntArray = pages[is_here & (pool.computed(pages) > 0)]
        return found

    def send(self, pages: IntArray) -> int:
        """Evict the pages. Return how many lost their frames at once; the others are written first."""
        pool = self._pool
        is_clean = pool.on_disk.is_kept(pages, pool.computed(pages))
        self._drop(pages[is_clean])
        dirty = pages[~is_clean]
        if dirty.size:
            self.going |= dict.fromkeys(dirty.tolist(), self._clock())
            self._write(dirty)
        return int(np.count_nonzero(is_clean))

    def keep_some_free(self) -> None:
        """Keep some frames free, so that a call which needs a page gets a frame at once."""
        pool, now_s = self._pool, self._clock()
        short = pool.core.low_water - pool.store.free.count - len(self.going)
        if short > 0 and now_s >= self._full_until_s:
            taken = self.victims(_NONE, short + pool.core.low_water)
            if not taken.size:
                self._full_until_s = now_s + FULL_FOR_S
            elif not self.is_grace(taken):
                self.send(taken)

    def clean_ahead(self) -> None:
        """Write the next pages to evict, while no ticket waits."""
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
            lib.core_row_changed(pool.core, int(row))

    def _write(self, pages: IntArray) -> None:
        self._pool.pin(pages)
        self._moves.write_out(pages, lambda error: self._is_written(pages, error))

    def _is_written(self, pages: IntArray, error: SymError | None) -> None:
        """Drop the frames of pages that were written, unless a page was used meanwhile or its write failed."""
        del error
        pool = self._pool
        pool.unpin(pages)
        since_s = np.array([self.going.pop(page, -1.0) for page in pages.tolist()])  # -1: the page was written ahead
        self._cleaning.difference_update(pages.tolist())
        due = self.may_go(pages[since_s >= pool.last_use[pages]])
        self._drop(due[pool.on_disk.is_kept(due, pool.computed(due))])


def least_recent(files: Files, gaps: Gaps) -> FloatArray:
    """Rank files by their last use. This is the policy until another policy is chosen."""
    del gaps
    return -files.idle_s


_NONE: IntArray = np.empty(0, np.int32)
