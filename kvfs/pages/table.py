"""A KV file is a page table: which pages hold its entries, and how many entries there are.

**The tail rule.** Several tables may end in one page, at different slots. A table may append in place if it ends
exactly at the page's fill: no other table can be using the slots beyond. It may also if it is the only one that refers
to the page: slots beyond its end are leftovers then. Every other table gets a copy of the page first.

**A reservation** is the room for one call of a step, or for several steps to come. Nobody sees its entries before
`commit_first`, which takes those that are computed so far, and `abort` takes it back without trace. The page that a
copy is made from stays referenced until then. The decoder copies the bytes when the step starts; before that the
source may be neither freed nor appended over.

Owned by the daemon's trio thread; nothing here awaits or blocks.
"""

from __future__ import annotations

from time import monotonic
from typing import Protocol, Self
from weakref import ref

import numpy as np
import numpy.typing as npt

from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import NO_ROW, RUNNING, PagePool, pages_for
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, OverQuota


class PageTable:
    """The entries of one KV file. `close` it when nobody needs it any more."""

    __slots__ = (
        "__weakref__",
        "_num_pages",
        "_owner",
        "_page_seconds",
        "_since_s",
        "_slots",
        "_source",
        "arena",
        "closed",
        "length",
        "pool",
        "reservation",
        "row",
    )

    def __init__(
        self, pool: PagePool, owner: int, pages: IntArray | None = None, length: int = 0, arena: int = RUNNING
    ) -> None:
        """An empty table; with `pages`, see `adopt`."""
        pages = _NO_PAGES if pages is None else pages
        self.pool = pool
        self.arena = arena
        """The arena of all its pages; NO_ARENA: they are another model's."""
        self._owner = owner
        self.length = length
        """Committed entries."""
        self.reservation: Reservation | None = None
        self.closed = False
        self.row = NO_ROW
        """Among the residents: see `kvfs.tiers.residents`."""
        self._source: ref[PageTable] | None = None
        self._slots = pages  # page numbers, with room to grow
        self._num_pages = len(pages)
        assert self._num_pages == -(-length // PAGE_ENTRIES)
        self._page_seconds = 0.0  # until `_since_s`, when the number of pages changed last
        self._since_s = monotonic()

    @classmethod
    def adopt(cls, pool: PagePool, owner: int, pages: IntArray, length: int, arena: int = RUNNING) -> Self:
        """A table over pages that already hold entries; it takes over the caller's references."""
        return cls(pool, owner, pages, length, arena)

    def __len__(self) -> int:
        return self.length

    @property
    def owner(self) -> int:
        """The account that pages are charged to, and whose bytes new ones hold."""
        return self._owner

    def change_owner(self, owner: int) -> None:
        """Charge another account from now on, or raise OverQuota and change nothing."""
        self.pool.move(self.held_pages(), self._owner, owner)
        self._owner = owner

    def hand_over(self, owner: int) -> Self:
        """The same table, charged to `owner`; without room for it the table is closed, and OverQuota raised."""
        if owner != self._owner:
            try:
                self.change_owner(owner)
            except OverQuota:
                self.close()
                raise
        return self

    @property
    def pages(self) -> IntArray:
        """The page numbers, in order: a view, good until the table changes."""
        return self._slots[: self._num_pages]

    @property
    def next_position(self) -> int:
        """The position after the last entry's; 0 for an empty table."""
        if self.length == 0:
            return 0
        last = self.length - 1
        return int(self.pool.positions[self._slots[last // PAGE_ENTRIES], last % PAGE_ENTRIES]) + 1

    @property
    def exclusive_pages(self) -> int:
        """Pages that nobody else refers to: what closing this table would free."""
        return int(np.count_nonzero(self.pool.refcount[self.pages] == 1))

    def read(self, first: int = 0, stop: int | None = None) -> tuple[IntArray, IntArray]:
        """Token ids and positions of the entries from `first` to `stop` (all), as arrays of the caller's own."""
        stop = self.length if stop is None else stop
        assert 0 <= first <= stop <= self.length
        pages = self._slots[first // PAGE_ENTRIES : pages_for(stop)]
        begin = first // PAGE_ENTRIES * PAGE_ENTRIES
        tokens = self.pool.tokens[pages].reshape(-1)[first - begin : stop - begin]
        positions = self.pool.positions[pages].reshape(-1)[first - begin : stop - begin]
        return tokens, positions

    def fork(self, owner: int | None = None, held: tuple[IntArray, int] | None = None) -> PageTable:
        """A second table over the same pages, for `owner` (default: the same): integers are copied, never KV.

        While a reservation is open, the fork has the committed entries only. OverQuota: another owner has no room.
        `held`: the pages and the length that this table had when a reader took references on them.
        """
        assert held is not None or not self.closed
        pages, length = held or (self.pages, self.length)
        pages = pages.copy()
        owner = self._owner if owner is None else owner
        self.pool.retain(pages, owner)
        fork = PageTable.adopt(self.pool, owner, pages, length, self.arena)
        fork._source = ref(self)  # noqa: SLF001 - of its own kind
        return fork

    @property
    def source(self) -> PageTable | None:
        """The table that this table is a fork of, while that is open."""
        source = None if self._source is None else self._source()
        return None if source is None or source.closed else source

    def truncate(self, length: int) -> None:
        """Keep the first `length` entries. Pages that others share keep all of theirs."""
        assert not self.closed
        assert self.reservation is None
        if not 0 <= length <= self.length:
            raise Invalid(f"can't truncate to {length} entries: the file has {self.length}")
        num_pages = pages_for(length)
        gone = self._slots[num_pages : self._num_pages]
        self.leave(gone)
        self.pool.release(gone, self._owner)
        self._has_pages(num_pages)
        self.length = length

    def leave(self, pages: IntArray) -> bool:
        """Give up pages that this table used last: they are its source's again, or nobody's. False: there were none."""
        if self.row == NO_ROW:
            return False
        mine, source = pages[self.pool.row_of[pages] == self.row], self.source
        self.pool.row_of[mine] = NO_ROW if source is None else source.row
        return bool(mine.size)

    def close(self) -> None:
        """Give every page back. Not while a reservation is open."""
        assert not self.closed
        assert self.reservation is None
        self.pool.release(self.pages, self._owner)
        self._has_pages(0)
        self.length = 0
        self.closed = True

    def reserve(self, tokens: npt.ArrayLike, positions: npt.ArrayLike) -> Reservation:
        """Make room for new entries after the last, or raise OverQuota or NoSpace and change nothing."""
        assert not self.closed
        assert self.reservation is None
        tokens, positions = np.asarray(tokens, np.int32), np.asarray(positions, np.int32)
        assert 0 < tokens.size == len(tokens) == len(positions) == positions.size
        tail = self.length % PAGE_ENTRIES
        source = int(self._slots[self._num_pages - 1]) if tail else None
        if source is not None and not self.pool.may_append(source, tail):
            self.reservation = self._reserve_copying(source, tokens, positions)
        else:
            self.reservation = self._reserve_in_place(source, tokens, positions)
        return self.reservation

    def _reserve_in_place(self, tail_page: int | None, tokens: IntArray, positions: IntArray) -> Reservation:
        num_pages = pages_for(self.length + tokens.size)
        added = num_pages - self._num_pages
        if added:
            new_pages, is_stale = self.pool.allocate_stale(added, self._owner, may_wait=True)
            self._grow(num_pages)
            self._slots[self._num_pages : num_pages] = new_pages
        else:
            new_pages, is_stale = _NO_PAGES, None
        reservation = Reservation(
            self,
            tokens=tokens,
            positions=positions,
            pages=self._slots[:num_pages],
            new_pages=new_pages,
            is_stale=is_stale,
            tail_page=tail_page,
        )
        reservation.write_entries()
        return reservation

    def _reserve_copying(self, source: int, tokens: IntArray, positions: IntArray) -> Reservation:
        num_pages = pages_for(self.length + tokens.size)
        new_pages, is_stale = self.pool.allocate_stale(num_pages - self._num_pages + 1, self._owner, may_wait=True)
        pages = np.concatenate((self._slots[: self._num_pages - 1], new_pages))
        target = int(new_pages[0])
        self.pool.copy_entries(source, target, self.length % PAGE_ENTRIES)
        reservation = Reservation(
            self,
            tokens=tokens,
            positions=positions,
            pages=pages,
            new_pages=new_pages,
            is_stale=is_stale,
            tail_page=target,
            copies=((source, target),),
        )
        reservation.write_entries()
        return reservation

    @property
    def page_seconds(self) -> float:
        """Pages times the seconds that it had them, until now."""
        return self._page_seconds + self._num_pages * (monotonic() - self._since_s)

    def _has_pages(self, num_pages: int) -> None:
        """Set how many pages the table has, and count the page seconds until now."""
        if num_pages != self._num_pages:
            now_s = monotonic()
            self._page_seconds += self._num_pages * (now_s - self._since_s)
            self._since_s = now_s
            self._num_pages = num_pages

    def put_behind(self, pages: IntArray) -> None:
        """Store page numbers: they begin with the table's own, and go on with those that are reserved."""
        self._grow(len(pages))
        self._slots[: len(pages)] = pages

    def _grow(self, num_pages: int) -> None:
        if num_pages > self._slots.size:
            slots = np.empty(max(num_pages, 2 * self._slots.size), np.int32)
            slots[: self._num_pages] = self.pages
            self._slots = slots

    def _close_reservation(self, reservation: Reservation) -> None:
        assert self.reservation is reservation, "this reservation was committed or aborted before"
        self.reservation = None
        reservation.unpin()

    def _commit(self, reservation: Reservation, num_entries: int) -> None:
        if num_entries == reservation.tokens.size:
            self._close_reservation(reservation)
        self.length += num_entries
        self._has_pages(pages_for(self.length))
        if reservation.copies:
            self._slots = reservation.pages
            copied = np.array([reservation.copies[0][0]], np.int32)
            self.leave(copied)
            self.pool.release(copied, self._owner)

    # The books

    def held_pages(self) -> IntArray:
        """Every page referred to, those of an open reservation included."""
        if self.reservation is None:
            return self.pages
        return np.concatenate((self.pages, self.reservation.new_pages))

    def check(self) -> None:
        """Raise AssertionError if length, pages and fills contradict each other, or a page is of another arena."""
        self.pool.check_fill(self.pages, self.length)
        arenas = self.pool.arena[pages := self.held_pages()]
        if (arenas != self.arena).any():
            raise AssertionError(f"pages {pages} of a file of arena {self.arena} are of arenas {arenas}")


class Uses(Protocol):
    """Uses of files, by row."""

    def end_use(self, row: int) -> None:
        """The last computation with a file is over."""
        ...


class Reservation:
    """Room for new entries of one table: what a step needs to compute them. End it with `commit` or `abort`."""

    __slots__ = (
        "_is_stale",
        "_num_copied",
        "_num_zeroed",
        "_owner",
        "_reserved_page",
        "_tail_page",
        "_uses",
        "copies",
        "new_pages",
        "pages",
        "pinned",
        "positions",
        "start",
        "table",
        "tokens",
    )

    def __init__(
        self,
        table: PageTable,
        *,
        tokens: IntArray,
        positions: IntArray,
        pages: IntArray,
        new_pages: IntArray,
        is_stale: npt.NDArray[np.bool_] | None,
        tail_page: int | None,
        copies: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.table = table
        self.start = table.length
        """Entry index of tokens[0]."""
        self.tokens = tokens
        self.positions = positions
        self.pages = pages
        """Page table that covers every entry below `start + len(tokens)`; good until commit or abort."""
        self.copies = copies
        """(source, target) pages whose KV bytes must be copied before anything is computed."""
        self.new_pages = new_pages
        """The last of `pages`."""
        self._owner = table.owner
        if copies:
            self._copy_over(is_stale)
        # Of each new page: it holds bytes of others until it is zeroed. None: no page does, the usual case.
        self._is_stale = is_stale if is_stale is not None and is_stale.any() else None
        self._num_zeroed = 0  # new pages whose turn has come
        self.pinned: IntArray | None = None
        """Pages that keep their frames until this is closed; None: it is not `ready`, and some may have none."""
        self._uses: Uses
        self._reserved_page = None if copies else tail_page
        self._tail_page = tail_page  # the page that holds entry start - 1 and has room left: the copy, if there is one

    @property
    def is_open(self) -> bool:
        """Whether some of it is neither committed nor given back."""
        return self.table.reservation is self

    # Where it is: room is made of numbers, and frames come when it is its turn

    def needed(self) -> IntArray:
        """Every page whose bytes a step reads or writes; the new ones are the last."""
        return np.concatenate((self.copies[0][:1], self.pages), dtype=np.int32) if self.copies else self.pages.copy()

    def ready(self, pages: IntArray, row: int, uses: Uses) -> None:
        """Pin the `needed` pages, which are in memory, until the reservation is closed: a use of its file, by `row`."""
        pool = self.table.pool
        pool.pin(pages)
        pool.row_of[pages] = row
        self.pinned, self._uses = pages, uses

    def unpin(self) -> None:
        """Let go of the pages: nothing computes with the reservation any more."""
        if self._reserved_page is not None:
            self.table.pool.num_reserved[self._reserved_page] = 0
        if self.pinned is not None:
            pool, pages = self.table.pool, self.pinned
            pool.unpin(pages)
            pool.last_use[pages] = monotonic()
            self.pinned = None
            if self.table.row != NO_ROW:
                self._uses.end_use(self.table.row)
            pool.let_go()

    def without_frames(self) -> IntArray:
        """New pages that have none."""
        of = self.table.pool.store.of
        missing: IntArray = self.new_pages[of[self.new_pages] == NOWHERE]
        return missing

    def give_frames(self, frames: IntArray) -> None:
        """To those that have none, and as many."""
        of, pool = self.table.pool.store.of, self.table.pool
        missing = of[self.new_pages] == NOWHERE
        is_stale = np.zeros(len(self.new_pages), np.bool_) if self._is_stale is None else self._is_stale
        is_stale[missing] = pool.give_frames_to(self.new_pages[missing], self._owner, frames)
        if self.copies and missing[0]:
            self._copy_over(is_stale)
            pool.expect_copy(self.copies[0][1])
        self._is_stale = is_stale if is_stale.any() else None

    def forget_frames(self) -> None:
        """Give back the frames of the new pages, which hold nothing yet, while the reservation waits."""
        self.table.pool.forget_frames(self.new_pages)
        self._is_stale = None

    def frames(self, num_pages: int) -> IntArray:
        """Where the first pages are in memory: what a decoder computes over. The file has to be there."""
        return self.table.pool.store.frames_of(self.pages[:num_pages])

    def _copy_over(self, is_stale: npt.NDArray[np.bool_] | None) -> None:
        """The tail is copied into the first new page: all of it where that has bytes of others, else what is filled."""
        assert is_stale is not None
        self._num_copied = PAGE_ENTRIES if is_stale[0] else self.start % PAGE_ENTRIES
        is_stale[0] = False

    def frame_copies(self) -> list[tuple[int, int, int]]:
        """`copies`, as a decoder makes them: (source, target, entries)."""
        of = self.table.pool.store.of
        return [(int(of[source]), int(of[target]), self._num_copied) for source, target in self.copies]

    def write_entries(self) -> None:
        """Put tokens and positions into the pages and move their fills. Called once, by `reserve`."""
        pool, owner = self.table.pool, self.table.owner
        first, end = self.start, self.start + self.tokens.size
        slot = first % PAGE_ENTRIES
        if self._tail_page is not None:
            pool.on_disk.overwritten(self._tail_page, slot)
        if self._reserved_page is not None:
            pool.num_reserved[self._reserved_page] = PAGE_ENTRIES - slot
        last_page = (end - 1) // PAGE_ENTRIES
        if first // PAGE_ENTRIES == last_page:  # one page: the decode path
            page = self.pages[last_page]
            stop = slot + self.tokens.size
            pool.tokens[page, slot:stop] = self.tokens
            pool.positions[page, slot:stop] = self.positions
            pool.set_fill(page, stop, owner)
            return
        touched = self.pages[first // PAGE_ENTRIES :]
        slots = np.arange(slot, slot + self.tokens.size)
        where = touched[slots // PAGE_ENTRIES], slots % PAGE_ENTRIES
        pool.tokens[where] = self.tokens
        pool.positions[where] = self.positions
        if self._tail_page is not None:
            pool.set_fill(self._tail_page, PAGE_ENTRIES, owner)
        pool.fill[self.new_pages] = PAGE_ENTRIES
        pool.fill[self.pages[last_page]] = end - last_page * PAGE_ENTRIES

    def extend(self, positions: IntArray) -> None:
        """Reserve room for more entries behind these, or raise OverQuota or NoSpace and change nothing."""
        table, pool = self.table, self.table.pool
        first = self.start + self.tokens.size
        end = first + positions.size
        added = pages_for(end) - len(self.pages)
        if added:
            new_pages, is_stale = pool.allocate_stale(added, table.owner)
            if self.pinned is not None:
                pool.pin(new_pages)
                pool.row_of[new_pages] = pool.row_of[self.pages[-1]]
                self.pinned = np.concatenate((self.pinned, new_pages))
            self.pages = np.concatenate((self.pages, new_pages))
            if not self.copies:
                table.put_behind(self.pages)
            before = np.zeros(len(self.new_pages), np.bool_) if self._is_stale is None else self._is_stale
            self.new_pages = np.concatenate((self.new_pages, new_pages))
            if self._is_stale is not None or is_stale.any():
                self._is_stale = np.concatenate((before, is_stale))
        self.tokens = np.concatenate((self.tokens, np.zeros(positions.size, np.int32)))
        self.positions = np.concatenate((self.positions, positions))
        self._write(first, end)

    def _write(self, first: int, end: int) -> None:
        """Tokens and positions of these entries into pages that are reserved already, and their fills."""
        pool = self.table.pool
        entries = np.arange(first, end)
        where = self.pages[entries // PAGE_ENTRIES], entries % PAGE_ENTRIES
        pool.tokens[where] = self.tokens[first - self.start : end - self.start]
        pool.positions[where] = self.positions[first - self.start : end - self.start]
        for page in range(first // PAGE_ENTRIES, pages_for(end)):
            pool.set_fill(int(self.pages[page]), min(PAGE_ENTRIES, end - page * PAGE_ENTRIES), self.table.owner)

    def pages_to_zero(self, num_entries: int) -> list[int]:
        """Pages with bytes of others, to be zeroed before the first `num_entries` are computed; each is named once.

        It takes 0.1 ms a page or more: a thread beside the steps does it, not the one that reserves.
        """
        if self._is_stale is None:
            return []
        first, stop = self._num_zeroed, pages_for(self.start + num_entries) - len(self.pages) + len(self.new_pages)
        if stop <= first:
            return []
        self._num_zeroed = stop
        due: list[int] = self.new_pages[first:stop][self._is_stale[first:stop]].tolist()
        return due

    def commit_first(self, tokens: IntArray) -> None:
        """The first entries are computed, with these tokens, and become part of the file; others stay reserved."""
        count, pool = tokens.size, self.table.pool
        assert 0 < count <= self.tokens.size
        if count == 1:  # the decode path
            pool.tokens[self.pages[self.start // PAGE_ENTRIES], self.start % PAGE_ENTRIES] = tokens[0]
        else:
            slots = np.arange(self.start, self.start + count)
            pool.tokens[self.pages[slots // PAGE_ENTRIES], slots % PAGE_ENTRIES] = tokens
        num_taken = pages_for(self.start + count) - len(self.pages) + len(self.new_pages)
        if self._is_stale is not None or self.copies:
            self._claim(num_taken)
        self.table._commit(self, count)  # noqa: SLF001 - the two classes are one mechanism
        if count < self.tokens.size:
            self._shift(count, num_taken)

    def _shift(self, count: int, num_taken: int) -> None:
        """Become the reservation of what is left."""
        self.start += count
        self.tokens, self.positions = self.tokens[count:], self.positions[count:]
        self.new_pages = self.new_pages[num_taken:]
        if self._is_stale is not None:
            self._is_stale = self._is_stale[num_taken:]
            self._num_zeroed = max(0, self._num_zeroed - num_taken)
        self.copies = ()
        self._tail_page = int(self.pages[self.start // PAGE_ENTRIES]) if self.start % PAGE_ENTRIES else None

    def _claim(self, num_taken: int) -> None:
        """Note that what was overwritten, the first new pages, holds bytes of the owner alone."""
        pool, stale = self.table.pool, self._is_stale
        assert stale is None or not stale[self._num_zeroed : num_taken].any(), "pages of others were not zeroed"
        if self.table.owner != self._owner:
            return  # the file changed hands meanwhile: the pages hold bytes of both
        if stale is not None:
            pool.claim(self.new_pages[:num_taken][stale[:num_taken]], self._owner)
        for source, target in self.copies:
            pool.claim_copy(source, target, self._owner)

    def abort(self) -> None:
        """The step failed: give the room back, as if nothing had been reserved."""
        self.table._close_reservation(self)  # noqa: SLF001 - the two classes are one mechanism
        pool, owner = self.table.pool, self.table.owner
        if self._tail_page is not None and not self.copies:
            pool.set_fill(self._tail_page, self.start % PAGE_ENTRIES, owner)
        pool.release(self.new_pages, owner)


_NO_PAGES = np.empty(0, np.int32)
