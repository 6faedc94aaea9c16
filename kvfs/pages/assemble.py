"""Makes a KV file from entries of other files: extract picks ranges of one file, merge joins several files.

The work has five parts, so that a worker thread can do the slow parts while the owner of the pool goes on:

    assembly = Assembly(pool, owner, pieces, ...)       owner thread: takes references on the sources
    assembly.plan()                                     worker thread: finds sources of each page, and shared pages
    assembly.reserve(frames)                            owner thread: allocates the pages, or raises NoSpace
    assembly.fill()                                     worker thread: copies entries and rotates their keys
    table = assembly.finish()   or   assembly.abandon() owner thread

A page of the new file is shared, as in a fork, if a page of a source has the same entries in the same places, at the
same positions. The other pages are copies, and no other code knows them before `finish`.

The source pages of copies have to be in memory from before `reserve` until `fill` ends. `pages_to_read` lists them, and
the caller pins them. Shared pages may be anywhere. `reserve` pins the new pages in memory until the end.
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
"""[n, 2]: for each range, the first entry and the entry behind the last entry."""


@dataclass(frozen=True, slots=True)
class SourceRanges:
    """Consecutive ranges of entries of one file."""

    table: PageTable
    ranges: Ranges
    """The ranges, which lie within the table's length: see `ranges_within`."""

    @property
    def num_entries(self) -> int:
        """The number of entries in all ranges."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the entries of each page of the new file come from."""

    pages: IntArray
    """[num_pages, 32]: pages of the source. Padding behind the last entry repeats the page of the row's first entry."""
    slots: IntArray
    shifts: IntArray
    """[num_pages, 32]: by how many positions each entry moves up."""
    tokens: IntArray
    positions: IntArray
    """[num_pages, 32]: positions in the new file, with zeros behind the last entry."""
    shared: npt.NDArray[np.bool_]
    """[num_pages]: whether the page is shared with the source."""


class Assembly:
    """A KV file that is being put together. `finish` or `abandon` ends it."""

    def __init__(
        self, pool: PagePool, owner: int, pieces: Sequence[SourceRanges], *, rebase: bool, max_positions: int
    ) -> None:
        self.num_entries = sum(piece.num_entries for piece in pieces)
        if rebase and self.num_entries > max_positions:
            raise Invalid(
                f"{self.num_entries} entries can't have positions from 0 on: the model's context is {max_positions}; "
                "pick fewer, or keep their old positions (rebase=False)"
            )
        if self.num_entries > pool.num_pages * PAGE_ENTRIES:  # checked before any array of this size is made
            raise NoSpace(f"{self.num_entries} entries are more than the whole page pool holds: pick fewer")
        self.pool = pool
        self.owner = owner
        self.rebase = rebase
        self.closed = False
        # Forks of the sources, so that the sources may go on growing. The accounts of the sources pay for these forks.
        self.sources: tuple[PageTable, ...] = tuple(piece.table.fork() for piece in pieces)
        self._ranges = [piece.ranges for piece in pieces]
        self._plan: _Plan | None = None
        self._pages: IntArray = np.empty(0, np.int32)
        self._new_pages = self._pages

    def plan(self) -> None:
        """Find the sources of each page. A worker thread may call this method, because the method only reads pages that
        have references.
        """
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
        """Pages that `reserve` will allocate."""
        return int(np.count_nonzero(~self._planned().shared))

    def pages_to_read(self) -> IntArray:
        """Return the source pages that `fill` reads, each page once."""
        plan = self._planned()
        found: IntArray = np.unique(plan.pages[~plan.shared])
        return found

    def reserve(self, frames: IntArray | None = None) -> None:
        """Allocate the pages, or raise NoSpace or OverQuota and change nothing.

        `frames`, from `take_frames`, are for the new pages. On an error the frames are given back.
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
        """Write the new pages, in a worker thread. `checkpoint` is called between pages and may raise."""
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
        """Return the table of the new file, which owns the pages from then on."""
        new_pages = self._new_pages
        self.pool.claim(new_pages, self.owner)
        self.pool.fill[new_pages] = PAGE_ENTRIES
        tail = self.num_entries % PAGE_ENTRIES
        if tail and len(new_pages) and new_pages[-1] == self._pages[-1]:
            self.pool.fill[new_pages[-1]] = tail
        self._close()
        return PageTable(self.pool, self.owner, self._pages, self.num_entries)

    def abandon(self) -> None:
        """Free the pages, as if the assembly had never begun."""
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
        """Return page and place in the page of every entry, in the order of the new file."""
        pages, slots = [_NONE], [_NONE]
        for source, ranges in zip(self.sources, self._ranges, strict=True):
            lengths = ranges[:, 1] - ranges[:, 0]
            before = np.cumsum(lengths) - lengths
            index = np.repeat(ranges[:, 0] - before, lengths) + np.arange(lengths.sum())
            pages.append(source.pages[index // PAGE_ENTRIES])
            slots.append((index % PAGE_ENTRIES).astype(np.int32))
        return np.concatenate(pages), np.concatenate(slots)

    # The audit

    def held_pages(self) -> IntArray:
        """Return every page that is charged to the owner."""
        return self._pages[:0] if self.closed else self._pages

    def check(self) -> None:
        """Do nothing: the audit counts the references, and other code sees the pages only after the assembly ends."""


def ranges_within(ranges: Ranges, length: int, what: object) -> Ranges:
    """Return ranges whose bounds are from 0 to `length`. A negative bound counts from the end; RANGE_END is the end."""
    found = np.where(ranges == RANGE_END, length, ranges)
    found[found < 0] += length
    wrong = np.flatnonzero((found[:, 0] < 0) | (found[:, 0] > found[:, 1]) | (found[:, 1] > length))
    if wrong.size:
        start, stop = ranges[wrong[0]].tolist()
        shown = "the end" if stop == RANGE_END else stop
        raise Invalid(f"entries {start} to {shown} are no range of {what}: it has {length} entries, 0 to {length}")
    return found


def _first_of_each(pages: IntArray, candidates: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Keep only the first of the candidates that name the same page, so that the new table has no page twice."""
    where = np.flatnonzero(candidates)
    _, first = np.unique(pages[where], return_index=True)
    chosen = np.zeros(len(pages), np.bool_)
    chosen[where[first]] = True
    return chosen


_NONE = np.empty(0, np.int32)
