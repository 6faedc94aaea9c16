"""Makes a KV file of entries of others: extract picks ranges of one file, merge joins several.

Five moves, so that the slow ones can run in a worker thread while the owner of the pool goes on:

    assembly = Assembly(pool, owner, pieces, ...)       owner thread: holds the sources as they are now
    assembly.plan()                                     worker thread: which page is made of what, what can be shared
    assembly.reserve(frames)                            owner thread: takes the pages, or NoSpace
    assembly.fill()                                     worker thread: copies entries and turns their keys
    table = assembly.finish()   or   assembly.abandon() owner thread

Where a page of the new file would equal a page of a source, in the same places and at the same positions, it is that
page: shared, not copied, as in a fork. No other code knows the other pages before `finish`.

What is read has to be in memory from before `reserve` until `fill` is over: `pages_to_read` says which pages of the
sources that are, and the caller holds them there. Shared pages may be anywhere. New pages stay in memory until
the end, which pins them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import PagePool, pages_for
from kvfs.pages.table import PageTable
from libsym.abi import PAGE_ENTRIES, RANGE_END
from libsym.errors import Invalid, NoSpace

Ranges: TypeAlias = npt.NDArray[np.int64]
"""[n, 2]: first entry and the one after the last."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Ranges of entries of one file, one after the other."""

    table: PageTable
    ranges: Ranges
    """Within the table: see `ranges_within`."""

    @property
    def num_entries(self) -> int:
        """Entries of all ranges."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the entries of each page of the new file come from."""

    pages: IntArray
    """[num_pages, 32] of the source; behind the last entry as if the page went on."""
    slots: IntArray
    shifts: IntArray
    """Positions that an entry moves up by."""
    tokens: IntArray
    positions: IntArray
    """[num_pages, 32] of the new file, zeros behind the last entry."""
    shared: npt.NDArray[np.bool_]
    """[num_pages]: the page is the source's."""


class Assembly:
    """A KV file that is being put together. End it with `finish` or `abandon`."""

    def __init__(
        self, pool: PagePool, owner: int, pieces: Sequence[Piece], *, rebase: bool, max_positions: int
    ) -> None:
        self.num_entries = sum(piece.num_entries for piece in pieces)
        if rebase and self.num_entries > max_positions:
            raise Invalid(
                f"{self.num_entries} entries can't have positions from 0 on: the model's context is {max_positions}; "
                "pick fewer, or keep their old positions (rebase=False)"
            )
        if self.num_entries > pool.num_pages * PAGE_ENTRIES:  # before any array of that size is made
            raise NoSpace(f"{self.num_entries} entries are more than the whole page pool holds: pick fewer")
        self.pool = pool
        self.owner = owner
        self.rebase = rebase
        self.closed = False
        # Forks in all but name, charged to whom the sources are charged already: they may go on growing.
        self.sources: tuple[PageTable, ...] = tuple(piece.table.fork() for piece in pieces)
        self._ranges = [piece.ranges for piece in pieces]
        self._plan: _Plan | None = None
        self._pages: IntArray = np.empty(0, np.int32)
        self._new_pages = self._pages

    def plan(self) -> None:
        """Find out what each page is made of. For a worker thread: reads what is held, changes nothing."""
        pool, num_pages = self.pool, pages_for(self.num_entries)
        pages, slots = self._entries()
        padding = num_pages * PAGE_ENTRIES - self.num_entries
        tokens = np.pad(pool.tokens[pages, slots], (0, padding))
        positions = pool.positions[pages, slots]
        moved = np.arange(self.num_entries, dtype=np.int32) if self.rebase else positions
        shifts = np.pad(moved - positions, (0, padding))
        rows = (num_pages, PAGE_ENTRIES)
        pages, slots = (np.pad(each, (0, padding)).reshape(rows) for each in (pages, slots))
        if padding:
            tail = PAGE_ENTRIES - padding
            pages[-1, tail:], slots[-1, tail:] = pages[-1, 0], np.arange(tail, PAGE_ENTRIES)
        shifts = shifts.reshape(rows)
        same = (pages == pages[:, :1]) & (slots == np.arange(PAGE_ENTRIES)) & (shifts == 0)
        positions = np.pad(moved, (0, padding)).reshape(rows)
        shared = _first_of_each(pages[:, 0], same.all(axis=1))
        self._plan = _Plan(pages, slots, shifts, tokens.reshape(rows), positions, shared)

    @property
    def num_new_pages(self) -> int:
        """Pages that it will take."""
        return int(np.count_nonzero(~self._planned().shared))

    def pages_to_read(self) -> IntArray:
        """Pages of the sources that `fill` reads; each is named once."""
        plan = self._planned()
        found: IntArray = np.unique(plan.pages[~plan.shared])
        return found

    def reserve(self, frames: IntArray | None = None) -> None:
        """Take the pages, or raise NoSpace or OverQuota and change nothing. `frames`: of `take_frames`, for the new
        pages; they are used, or given back.
        """
        plan, pool = self._planned(), self.pool
        pages = plan.pages[:, 0].copy()
        try:
            new_pages = pool.allocate(self.num_new_pages, self.owner, frames)
        except BaseException:
            if frames is not None:
                pool.return_frames(frames)
            raise
        try:
            pool.retain(pages[plan.shared], self.owner)
        except BaseException:
            pool.release(new_pages, self.owner)
            raise
        pages[~plan.shared] = new_pages
        self._pages, self._new_pages = pages, new_pages
        pool.pin(new_pages)

    def fill(self, checkpoint: Callable[[], None] = lambda: None) -> None:
        """Write the new pages. For a worker thread; `checkpoint` is called between pages and may raise."""
        plan, store = self._planned(), self.pool.store
        new = np.flatnonzero(~plan.shared)
        for index in new.tolist():
            checkpoint()
            count = min(PAGE_ENTRIES, self.num_entries - index * PAGE_ENTRIES)
            store.assemble(
                int(self._pages[index]),
                plan.pages[index, :count],
                plan.slots[index, :count],
                plan.shifts[index, :count],
            )
        self.pool.tokens[self._pages[new]] = plan.tokens[new]
        self.pool.positions[self._pages[new]] = plan.positions[new]

    def finish(self) -> PageTable:
        """The table of the new file; it owns the pages from here on."""
        new_pages = self._new_pages
        self.pool.claim(new_pages, self.owner)
        self.pool.fill[new_pages] = PAGE_ENTRIES
        tail = self.num_entries % PAGE_ENTRIES
        if tail and len(new_pages) and new_pages[-1] == self._pages[-1]:
            self.pool.fill[new_pages[-1]] = tail
        self._close()
        return PageTable(self.pool, self.owner, self._pages, self.num_entries)

    def abandon(self) -> None:
        """Give the pages back, as if nothing had been asked."""
        self._close()
        self.pool.release(self._pages, self.owner)

    def _close(self) -> None:
        assert not self.closed
        self.closed = True
        self.pool.unpin(self._new_pages)
        for source in self.sources:
            source.close()

    def _planned(self) -> _Plan:
        assert self._plan is not None, "plan() comes first"
        assert not self.closed
        return self._plan

    def _entries(self) -> tuple[IntArray, IntArray]:
        """Page and slot of every entry, in the order of the new file."""
        pages, slots = [_NONE], [_NONE]
        for source, ranges in zip(self.sources, self._ranges, strict=True):
            lengths = ranges[:, 1] - ranges[:, 0]
            before = np.cumsum(lengths) - lengths
            index = np.repeat(ranges[:, 0] - before, lengths) + np.arange(lengths.sum())
            pages.append(source.pages[index // PAGE_ENTRIES])
            slots.append((index % PAGE_ENTRIES).astype(np.int32))
        return np.concatenate(pages), np.concatenate(slots)

    # The books

    def held_pages(self) -> IntArray:
        """Every page that is charged to the owner."""
        return self._pages[:0] if self.closed else self._pages

    def check(self) -> None:
        """Nothing beside its references: nobody sees its pages before it ends."""


def ranges_within(ranges: Ranges, length: int, what: object) -> Ranges:
    """Return ranges of a file of that length. Negative numbers count from its end; RANGE_END as a stop is its end."""
    found = np.where(ranges == RANGE_END, length, ranges)
    found[found < 0] += length
    wrong = np.flatnonzero((found[:, 0] < 0) | (found[:, 0] > found[:, 1]) | (found[:, 1] > length))
    if wrong.size:
        start, stop = ranges[wrong[0]].tolist()
        shown = "the end" if stop == RANGE_END else stop
        raise Invalid(f"entries {start} to {shown} are no range of {what}: it has {length} entries, 0 to {length}")
    return found


def _first_of_each(pages: IntArray, candidates: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Candidates that name a page first: a table mentions no page twice, so its counts stay simple."""
    where = np.flatnonzero(candidates)
    _, first = np.unique(pages[where], return_index=True)
    chosen = np.zeros(len(pages), np.bool_)
    chosen[where[first]] = True
    return chosen


_NONE = np.empty(0, np.int32)
