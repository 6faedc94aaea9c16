"""A KV file is a page table: which pages hold its entries, and how many entries there are.

A reservation is the room for one call of a step, or for several steps to come. `kvfs/core/core.h` says where a table
may append in place, and keeps both: classes here show them to Python. The page that a copy is made from stays
referenced until the reservation ends. The decoder copies the bytes when the step starts; before that the source may be
neither freed nor appended over.

Owned by the daemon's trio thread; nothing here awaits or blocks.
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
    """The entries of one KV file. `close` it when nobody needs it any more."""

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
        """An empty table. `pages`: that already hold `length` entries; it takes over the caller's references.

        `core`: a `core_table` that there is.
        """
        self.pool = pool
        self.arena = arena
        """The arena of all its pages; NO_ARENA: they are another model's."""
        self.owner = owner
        """The account that pages are charged to, and whose bytes new ones hold: see `change_owner`."""
        self.reservation: Reservation | None = None
        self._had_page_seconds = 0.0
        """Of a table that is closed."""
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
        """Whether the table is gone: nothing but its figures may be asked of it."""
        return self.core is _CLOSED

    @property
    def row(self) -> int:
        """Row of the file among the residents, see `kvfs.tiers.residents`. NO_ROW: it has none."""
        return int(self.core.row)

    def change_owner(self, owner: int) -> None:
        """Charge another account from now on, or raise OverQuota and change nothing."""
        assert not self.closed
        self.pool.done(lib.core_change_owner(self.core, self.pool.accounts.of(owner).core))
        self.owner = owner

    def hand_over(self, owner: int) -> Self:
        """The same table, charged to `owner`; without room for it the table is closed, and OverQuota raised."""
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
        """A copy: C moves them when there are more."""
        if first == stop:
            return _NO_PAGES
        return np.frombuffer(ffi.buffer(self.core.slots + first, 4 * (stop - first)), np.int32).copy()

    @property
    def next_position(self) -> int:
        """The position after the last entry's; 0 for an empty table."""
        return int(lib.core_position(self.core, self.core.length - 1)) + 1

    @property
    def exclusive_pages(self) -> int:
        """Pages that nobody else refers to: what closing this table would free."""
        return int(np.count_nonzero(self.pool.refcount[self.pages] == 1))

    def read(self, first: int = 0, stop: int | None = None) -> tuple[IntArray, IntArray]:
        """Token ids and positions of the entries from `first` to `stop` (all), as arrays of the caller's own."""
        stop = self.length if stop is None else stop
        assert 0 <= first <= stop <= self.length
        pages = self._slots(first // PAGE_ENTRIES, max(first // PAGE_ENTRIES, pages_for(stop)))
        begin = first // PAGE_ENTRIES * PAGE_ENTRIES
        tokens = self.pool.tokens[pages].reshape(-1)[first - begin : stop - begin]
        positions = self.pool.positions[pages].reshape(-1)[first - begin : stop - begin]
        return tokens, positions

    def fork(self, owner: int | None = None, held: tuple[IntArray, int] | None = None) -> PageTable:
        """A second table over the same pages, for `owner` (default: the same): integers are copied, never KV.

        While a reservation is open, the fork has the committed entries only. OverQuota: another owner has no room.
        `held`: the pages and the length that this table had when a reader took references on them.
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
        """Keep the first `length` entries. Pages that others share keep all of theirs."""
        assert not self.closed
        assert self.reservation is None
        if not 0 <= length <= self.length:
            raise Invalid(f"can't truncate to {length} entries: the file has {self.length}")
        self.pool.done(lib.core_truncate(self.core, length))

    def close(self) -> None:
        """Give every page back. Not while a reservation is open."""
        assert not self.closed
        assert self.reservation is None
        page_seconds = self.page_seconds
        outcome = lib.core_table_close(self.core)
        if outcome == lib.CORE_DONE:  # it may be another table's from now on, whatever goes wrong below
            self.core, self._had_page_seconds = _CLOSED, page_seconds
        self.pool.done(outcome)

    def reserve(self, tokens: npt.ArrayLike, positions: npt.ArrayLike | None = None, num_ahead: int = 0) -> Reservation:
        """Make room for new entries after the last, or raise OverQuota or NoSpace and change nothing.

        Without positions they go on from the last entry's. `num_ahead`: room for so many entries behind those, whose
        tokens are not known yet.
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
        """Pages times the seconds that it had them, until now."""
        return self._had_page_seconds if self.closed else float(lib.core_page_seconds(self.core))

    # The books

    def held_pages(self) -> IntArray:
        """Every page referred to, those of an open reservation included."""
        return self.pages if self.reservation is None else self.reservation.needed()

    def check(self) -> None:
        """Raise AssertionError if length, pages and fills contradict each other, or a page is of another arena."""
        self.pool.check_fill(self.pages, self.length)
        arenas = self.pool.arena[pages := self.held_pages()]
        if (arenas != self.arena).any():
            raise AssertionError(f"pages {pages} of a file of arena {self.arena} are of arenas {arenas}")


class Reservation:
    """Room for new entries of one table: what a step needs to compute them. End it with `commit_first` or `abort`."""

    __slots__ = ("table",)

    def __init__(self, table: PageTable) -> None:
        self.table = table

    @property
    def is_open(self) -> bool:
        """Whether some of it is neither committed nor given back."""
        return self.table.reservation is self

    @property
    def start(self) -> int:
        """The first entry that is not committed."""
        return int(self.table.core.start)

    @property
    def num_entries(self) -> int:
        """Entries from `start` on."""
        return int(self.table.core.num_entries)

    @property
    def stop(self) -> int:
        """The entry behind the last."""
        return self.start + self.num_entries

    @property
    def tokens(self) -> IntArray:
        """Tokens of its entries; 0: not known yet."""
        return self._entries(self.table.pool.tokens)

    @property
    def positions(self) -> IntArray:
        """Positions of its entries."""
        return self._entries(self.table.pool.positions)

    def _entries(self, column: IntArray) -> IntArray:
        begin = self.start // PAGE_ENTRIES
        whole: IntArray = column[self.pages[begin:]].reshape(-1)
        return whole[self.start - begin * PAGE_ENTRIES :][: self.num_entries]

    def position(self, entry: int) -> int:
        """The position of an entry, of the file's or of its own."""
        return int(lib.core_position(self.table.core, entry))

    @property
    def num_new_pages(self) -> int:
        """Pages that are not the file's yet."""
        core = self.table.core
        return int(core.num_reserved_pages - core.num_pages + (core.target != NO_ROW))

    @property
    def pages(self) -> IntArray:
        """Page table that covers every entry below `stop`."""
        found = np.empty(self.table.core.num_reserved_pages, np.int32)
        lib.core_reserved_pages(self.table.core, pointer(found))
        return found

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """(source, target) pages whose KV bytes must be copied before anything is computed."""
        core = self.table.core
        return () if core.target == NO_ROW else ((core.slots[core.num_pages - 1], core.target),)

    # Where it is: room is made of numbers, and frames come when it is its turn

    def needed(self) -> IntArray:
        """Every page whose bytes a step reads or writes; the new ones are the last, and behind them the copy."""
        return self.table._slots(0, self.table.core.num_pages + self.num_new_pages)  # noqa: SLF001 - the two are one mechanism

    def where(self) -> tuple[bool, bool]:
        """Whether the file's pages are in memory, and whether all that are needed are."""
        core, num_there = self.table.core, lib.core_num_there(self.table.core)
        return num_there >= core.num_pages, num_there == core.num_reserved_pages + (core.target != NO_ROW)

    @property
    def pinned(self) -> IntArray | None:
        """Pages that keep their frames until this is closed; None: it is not `ready`, and some may have none."""
        return self.needed() if self.table.core.is_pinned else None

    def ready(self) -> None:
        """Pin the `needed` pages, which are in memory, until the reservation is closed: a use of its file."""
        assert self.is_open
        lib.core_pin(self.table.core)

    def unpin(self) -> None:
        """Let go of the pages: nothing computes with the reservation any more."""
        if self.is_open:
            self._done(lib.core_unpin(self.table.core))

    def give_frames(self, frames: IntArray) -> None:
        """Bind frames to those new pages that have none, and as many."""
        assert self.is_open
        lib.core_give_room(self.table.core, pointer(frames))

    def forget_frames(self) -> None:
        """Give back the frames of the new pages, which hold nothing yet, while the reservation waits."""
        assert self.is_open
        self.table.pool.done(lib.core_forget_room(self.table.core))

    def frames(self) -> IntArray:
        """Return the frames of its pages, which all are in memory: what a decoder computes over."""
        found = np.empty(self.table.core.num_reserved_pages, np.int32)
        are_there = lib.core_frames(self.table.core, found.size, pointer(found))
        assert are_there, f"pages {self.pages} are not all in memory"
        return found

    def frame_copies(self) -> IntArray:
        """Return the copies that a decoder makes before it computes anything: source, target and entries of each."""
        found = np.empty(3, np.int32)
        return found if lib.core_copy(self.table.core, pointer(found)) else _NO_PAGES

    def extend(self, num_ahead: int) -> None:
        """Reserve room for more entries behind these, or raise OverQuota or NoSpace and change nothing."""
        assert self.is_open
        self.table.pool.done(lib.core_extend(self.table.core, num_ahead))

    def pages_to_zero(self, num_entries: int) -> list[int]:
        """Return pages with bytes of others, to be zeroed before the first `num_entries` are computed; each once.

        Zeroing takes 0.1 ms a page or more: a thread beside the steps does it, not the one that reserves.
        """
        due = np.empty(self.num_new_pages, np.int32)
        found: list[int] = due[: lib.core_pages_to_zero(self.table.core, num_entries, pointer(due))].tolist()
        return found

    def commit_first(self, tokens: IntArray) -> None:
        """Make the first entries, which are computed with these tokens, part of the file; others stay reserved."""
        assert self.is_open, "this reservation was committed or aborted before"
        outcome = lib.core_commit(self.table.core, pointer(tokens), tokens.size)
        assert outcome != lib.CORE_BROKEN, "more entries than are reserved, or pages of others were not zeroed"
        self._done(outcome)

    def abort(self) -> None:
        """Give the room back, as if nothing had been reserved: the step failed."""
        assert self.is_open, "this reservation was committed or aborted before"
        self._done(lib.core_abort(self.table.core))

    def _done(self, outcome: int) -> None:
        if not self.table.core.is_reserved:
            self.table.reservation = None
        self.table.pool.done(outcome)


_CLOSED = ffi.new("core_table *", dict.fromkeys(("row", "target", "tail_page", "marked_page"), NO_ROW))
"""In place of a table that was closed."""
