"""Page tables: the pages that hold a KV file's entries, and the number of entries.

A reservation is room for the entries of one call in the next step, or in several steps. The core keeps tables and
reservations, and the classes here show them to Python. `kvfs/core/core.h` says where a table may append in place. The
source page of a copy stays referenced until the reservation ends. The decoder copies the bytes when the step starts,
and before that the source must be neither freed nor overwritten.

Owned by the daemon's trio thread. Nothing here awaits or blocks.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvfs._pages import ffi, lib
from kvfs.pages.free_list import IntArray, pointer
from kvfs.pages.pool import NO_ROW, RUNNING, PagePool, pages_for
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, OverQuota

_NO_PAGES = np.empty(0, np.int32)


class PageTable:
    """The entries of one KV file. The last user of a table closes it."""

    __slots__ = ("__weakref__", "_had_page_seconds", "arena", "core", "owner", "pool", "reservation")

    def __init__(
        self,
        pool: PagePool,
        owner: int,
        pages: IntArray = _NO_PAGES,
        length: int = 0,
        arena: int = RUNNING,
        core: Any = None,
    ) -> None:
        """Make an empty table, or a table of `pages` with `length` entries. The table takes over the caller's
        references.

        `core`: an existing `core_table`, to show it to Python.
        """
        self.pool = pool
        self.arena = arena
        """The arena of all pages. NO_ARENA: the pages belong to another model."""
        self.owner = owner
        """The account that is charged for pages, and whose bytes new pages hold: see `change_owner`."""
        self.reservation: Reservation | None = None
        self._had_page_seconds = 0.0
        """Page-seconds of a closed table."""
        if core is None:
            assert len(pages) == pages_for(length)
            account = pool.accounts.of(owner).core
            core = lib.core_table_new(pool.core, account, arena, length, pointer(pages), len(pages))
            if not core:
                raise MemoryError("no memory for one more page table")
        self.core = core

    @property
    def length(self) -> int:
        """Committed entries."""
        return int(self.core.length)

    @property
    def closed(self) -> bool:
        """Whether the table is closed. A closed table has figures, but no entries."""
        return self.core is _CLOSED

    @property
    def row(self) -> int:
        """The file's row, see `kvfs.tiers.residents`. NO_ROW: the file has no row."""
        return int(self.core.row)

    def change_owner(self, owner: int) -> None:
        """Charge another account from now on, or raise OverQuota and change nothing."""
        assert not self.closed
        self.pool.done(lib.core_change_owner(self.core, self.pool.accounts.of(owner).core))
        self.owner = owner

    def hand_over(self, owner: int) -> Self:
        """Return the same table, charged to `owner`. If `owner` lacks room, close the table and raise OverQuota."""
        if owner != self.owner:
            try:
                self.change_owner(owner)
            except OverQuota:
                self.close()
                raise
        return self

    @property
    def pages(self) -> IntArray:
        """The page numbers, in order."""
        return self._slots(0, self.core.num_pages)

    def _slots(self, first: int, stop: int) -> IntArray:
        """Return a copy of page numbers, because C may move its array."""
        if first == stop:
            return _NO_PAGES
        return np.frombuffer(ffi.buffer(self.core.slots + first, 4 * (stop - first)), np.int32).copy()

    @property
    def next_position(self) -> int:
        """The position after the last entry. 0 for an empty table."""
        return int(lib.core_position(self.core, self.core.length - 1)) + 1

    @property
    def exclusive_pages(self) -> int:
        """Number of pages that only this table refers to. Closing the table would free them."""
        return int(np.count_nonzero(self.pool.refcount[self.pages] == 1))

    def read(self, first: int = 0, stop: int | None = None) -> tuple[IntArray, IntArray]:
        """Return token ids and positions of the entries from `first` to `stop` (default: all), as the caller's own
        arrays.
        """
        stop = self.length if stop is None else stop
        assert 0 <= first <= stop <= self.length
        pages = self._slots(first // PAGE_ENTRIES, max(first // PAGE_ENTRIES, pages_for(stop)))
        begin = first // PAGE_ENTRIES * PAGE_ENTRIES
        tokens = self.pool.tokens[pages].reshape(-1)[first - begin : stop - begin]
        positions = self.pool.positions[pages].reshape(-1)[first - begin : stop - begin]
        return tokens, positions

    def fork(self, owner: int | None = None, held: tuple[IntArray, int] | None = None) -> PageTable:
        """Return a second table of the same pages, charged to `owner` (default: the same account). Page numbers are
        copied, pages are not.

        During a reservation, the fork has only the committed entries. OverQuota: `owner` is another account, and lacks
        room. `held`: the pages and the length that this table had when a reader took references on them.
        """
        owner = self.owner if owner is None else owner
        if held is not None:
            pages, length = held
            self.pool.retain(pages, owner)
            fork = PageTable(self.pool, owner, pages, length, self.arena)
            if not self.closed:
                lib.core_comes_from(fork.core, self.core)
            return fork
        assert not self.closed
        at = ffi.new("core_table **")
        self.pool.done(lib.core_fork(self.core, self.pool.accounts.of(owner).core, at))
        return PageTable(self.pool, owner, arena=self.arena, core=at[0])

    def truncate(self, length: int) -> None:
        """Keep the first `length` entries. Shared pages keep their entries for other tables."""
        assert not self.closed
        assert self.reservation is None
        if not 0 <= length <= self.length:
            raise Invalid(f"can't truncate to {length} entries: the file has {self.length}")
        self.pool.done(lib.core_truncate(self.core, length))

    def close(self) -> None:
        """Release every page. No reservation may be open."""
        assert not self.closed
        assert self.reservation is None
        page_seconds = self.page_seconds
        outcome = lib.core_table_close(self.core)
        if outcome == lib.CORE_DONE:  # the core may reuse the table from now on, even if an error follows
            self.core, self._had_page_seconds = _CLOSED, page_seconds
        self.pool.done(outcome)

    def reserve(self, tokens: npt.ArrayLike, positions: npt.ArrayLike | None = None, num_ahead: int = 0) -> Reservation:
        """Reserve room for new entries behind the last entry, or raise OverQuota or NoSpace and change nothing.

        Without `positions`, the positions continue from the last entry's position. `num_ahead` more entries are
        reserved behind these, with tokens that are not known yet.
        """
        assert not self.closed
        assert self.reservation is None
        tokens, places = np.asarray(tokens, np.int32), ffi.NULL
        num = tokens.size
        assert 0 < num == len(tokens)
        if positions is not None:
            positions = np.asarray(positions, np.int32)
            assert positions.shape == tokens.shape
            places = pointer(positions)
        outcome = lib.core_reserve(self.core, pointer(tokens), places, num, num_ahead)
        reservation = Reservation(self)
        if outcome == lib.CORE_DONE:
            self.reservation = reservation
        self.pool.done(outcome)
        return reservation

    @property
    def page_seconds(self) -> float:
        """The integral of the number of pages over time until now, in page-seconds."""
        return self._had_page_seconds if self.closed else float(lib.core_page_seconds(self.core))

    # Changes: see kvfs/core/changes.c

    def is_of(self, number: int, uid: int) -> None:
        """Note that the table is the content of an inode from now on."""
        lib.core_is_file(self.core, number, uid)

    def changed(self) -> None:
        """Note that names or attributes of the table's inode have changed."""
        lib.core_changed(self.core)

    def name_gone(self) -> None:
        """Note that the table's inode loses a name or this content."""
        lib.core_name_gone(self.core)

    # The audit

    def held_pages(self) -> IntArray:
        """Return every page that the table refers to, including the pages of an open reservation."""
        return self.pages if self.reservation is None else self.reservation.needed()

    def check(self) -> None:
        """Raise AssertionError if length, pages and fills contradict each other, or a page is of another arena."""
        self.pool.check_fill(self.pages, self.length)
        arenas = self.pool.arena[pages := self.held_pages()]
        if (arenas != self.arena).any():
            raise AssertionError(f"pages {pages} of a file of arena {self.arena} are of arenas {arenas}")


class Reservation:
    """Room for new entries of one table, which a step computes. `commit_first` or `abort` ends it."""

    __slots__ = ("table",)

    def __init__(self, table: PageTable) -> None:
        self.table = table

    @property
    def is_open(self) -> bool:
        """Whether entries are still reserved: neither committed nor aborted."""
        return self.table.reservation is self

    @property
    def start(self) -> int:
        """The first entry that is not committed yet."""
        return int(self.table.core.start)

    @property
    def num_entries(self) -> int:
        """The number of reserved entries, from `start` on."""
        return int(self.table.core.num_entries)

    @property
    def stop(self) -> int:
        """The entry number behind the last reserved entry."""
        return self.start + self.num_entries

    @property
    def tokens(self) -> IntArray:
        """Tokens of the reserved entries. 0: the token is not known yet."""
        return self._entries(self.table.pool.tokens)

    @property
    def positions(self) -> IntArray:
        """Positions of the reserved entries."""
        return self._entries(self.table.pool.positions)

    def _entries(self, column: IntArray) -> IntArray:
        begin = self.start // PAGE_ENTRIES
        whole: IntArray = column[self.pages[begin:]].reshape(-1)
        return whole[self.start - begin * PAGE_ENTRIES :][: self.num_entries]

    def position(self, entry: int) -> int:
        """Return the position of an entry, committed or reserved."""
        return int(lib.core_position(self.table.core, entry))

    @property
    def num_new_pages(self) -> int:
        """Pages of the reservation that the file does not have yet."""
        core = self.table.core
        return int(core.num_reserved_pages - core.num_pages + (core.target != NO_ROW))

    @property
    def pages(self) -> IntArray:
        """The page table that covers every entry below `stop`."""
        found = np.empty(self.table.core.num_reserved_pages, np.int32)
        lib.core_reserved_pages(self.table.core, pointer(found))
        return found

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """Pairs (source, target) of pages: the source's KV bytes must be copied to the target before a step computes
        with the reservation.
        """
        core = self.table.core
        return () if core.target == NO_ROW else ((core.slots[core.num_pages - 1], core.target),)

    # Frames: a reservation is made of page numbers, and may get its frames later

    def needed(self) -> IntArray:
        """Return every page that a step reads or writes: the file's pages, the new pages, then the copy of the last
        page.
        """
        return self.table._slots(0, self.table.core.num_pages + self.num_new_pages)  # noqa: SLF001 - the two are one mechanism

    def where(self) -> tuple[bool, bool]:
        """Return whether the file's pages are in memory, and whether all `needed` pages are in memory."""
        core, num_there = self.table.core, lib.core_num_there(self.table.core)
        return num_there >= core.num_pages, num_there == core.num_reserved_pages + (core.target != NO_ROW)

    @property
    def pinned(self) -> IntArray | None:
        """The pages that the reservation has pinned until it ends. None: the reservation is not pinned."""
        return self.needed() if self.table.core.is_pinned else None

    def ready(self) -> None:
        """Pin the `needed` pages, which are all in memory, until the reservation ends. This begins a use of the
        file.
        """
        assert self.is_open
        lib.core_pin(self.table.core)

    def unpin(self) -> None:
        """Unpin the pages, after the last computation with the reservation."""
        if self.is_open:
            self._done(lib.core_unpin(self.table.core))

    def give_frames(self, frames: IntArray) -> None:
        """Give each new page that lacks a frame one of `frames`."""
        assert self.is_open
        lib.core_give_room(self.table.core, pointer(frames))

    def forget_frames(self) -> None:
        """Free the frames of the new pages while the reservation waits. The pages are still empty."""
        assert self.is_open
        self.table.pool.done(lib.core_forget_room(self.table.core))

    def frames(self) -> IntArray:
        """Return the frames of the reservation's pages, which are all in memory. A decoder computes with these
        frames.
        """
        found = np.empty(self.table.core.num_reserved_pages, np.int32)
        are_there = lib.core_frames(self.table.core, found.size, pointer(found))
        assert are_there, f"pages {self.pages} are not all in memory"
        return found

    def frame_copies(self) -> IntArray:
        """Return the copies that a decoder makes first: rows of source frame, target frame and number of entries."""
        found = np.empty(3, np.int32)
        return found if lib.core_copy(self.table.core, pointer(found)) else _NO_PAGES

    def extend(self, num_ahead: int) -> None:
        """Reserve room for `num_ahead` more entries, or raise OverQuota or NoSpace and change nothing."""
        assert self.is_open
        self.table.pool.done(lib.core_extend(self.table.core, num_ahead))

    def pages_to_zero(self, num_entries: int) -> list[int]:
        """Return stale pages, to be zeroed before the first `num_entries` are computed. Each page is returned once.

        Zeroing takes 0.1 ms or more for a page, so the thread `aside` does it, not the thread that reserves.
        """
        due = np.empty(self.num_new_pages, np.int32)
        found: list[int] = due[: lib.core_pages_to_zero(self.table.core, num_entries, pointer(due))].tolist()
        return found

    def commit_first(self, tokens: IntArray) -> None:
        """Commit the first entries, computed with these tokens, to the file. The rest stays reserved."""
        assert self.is_open, "this reservation was committed or aborted before"
        outcome = lib.core_commit(self.table.core, pointer(tokens), tokens.size)
        assert outcome != lib.CORE_BROKEN, "more entries than are reserved, or pages of others were not zeroed"
        self._done(outcome)

    def abort(self) -> None:
        """Free the room after a failed step, as if nothing had been reserved."""
        assert self.is_open, "this reservation was committed or aborted before"
        self._done(lib.core_abort(self.table.core))

    def _done(self, outcome: int) -> None:
        if not self.table.core.is_reserved:
            self.table.reservation = None
        self.table.pool.done(outcome)


_CLOSED = ffi.new("core_table *", dict.fromkeys(("row", "target", "tail_page", "marked_page"), NO_ROW))
"""Stands for the `core_table` of a closed table."""
