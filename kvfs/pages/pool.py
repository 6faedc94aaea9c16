"""The pool: every page's reference count, fill, owner, entries and digest.

A page is shared by any number of tables and snapshots; it is free when nothing refers to it. `kvfs/core/core.h` has the
rules that make the sharing safe. An owner is an account: to take or give back a reference is to say whose it is.

The daemon's trio thread owns the pool: it alone calls anything that changes a reference count or a fill. A worker
thread that holds a reference on pages (through a snapshot, for one) may do two things: call `digests_of` for full ones,
and read entries below their fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvfs._pages import ffi, lib
from kvfs.bell import Bell
from kvfs.pages.accounts import Accounts
from kvfs.pages.columns import MOST_ROWS, Columns, Numbers
from kvfs.pages.counts import Counts
from kvfs.pages.digest import DIGEST_BYTES, NUM_LANES, digests
from kvfs.pages.frames import NOWHERE, Frames
from kvfs.pages.free_list import FreeList, IntArray, pointer
from kvfs.pages.kept import Kept
from kvfs.pages.looking import ColdPages, NoColdPages, look
from kvfs.pages.on_disk import NO_SLOT, NoSlotFiles, OnDisk, SlotFiles
from kvfs.pages.store import PageStore
from libsym.abi import PAGE_ENTRIES
from libsym.errors import NoSpace

PAGES_A_LOOK = 2 * NUM_LANES
"""Read and hashed at once: from disk by one read."""

_SEVERAL = -1
"""The frame holds bytes of more than one owner, or of one unknown: zeroed for any owner."""


_FIRST_ROWS = 1 << 12
_LEFT = np.dtype([("page", "i4"), ("slot", "i4"), ("kept_until", "f8")])
"""Of `core_left`."""
NO_ROW = -1
"""In place of a row: no file that there still is."""

RUNNING, NO_ARENA = 0, 255
"""Arenas: the running model's, and in place of one for a model whose pages are on disk alone."""


def num_pages_of(num_frames: int, num_restored: int, num_on_disk: int) -> int:
    """Return how many pages of the running model there may be: see `PagePool`.

    With room on disk each of them could be there, so whatever is in memory can go. Or all of them fit into memory.
    """
    return max(num_frames, num_restored, num_on_disk) if num_on_disk else num_frames + num_restored


def pages_for(num_entries: int) -> int:
    """Return how many pages hold `num_entries` entries."""
    return -(-num_entries // PAGE_ENTRIES)


class PageHolder(Protocol):
    """A holder of references on pages: a table, a snapshot, an import under way."""

    @property
    def owner(self) -> int:
        """The account that is charged for them."""
        ...

    def held_pages(self) -> IntArray:
        """Every page held, once for each reference."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the holder contradicts itself or its pool."""
        ...


class PagePool:
    """The pages of one store. Tables, snapshots and imports take and give back references here."""

    def __init__(
        self,
        store: PageStore,
        accounts: Accounts | None = None,
        num_restored: int = 0,
        num_foreign: int = 0,
        num_on_disk: int = 0,
        slot_files: Callable[[], SlotFiles] = NoSlotFiles,
    ) -> None:
        """`accounts`: whose limits hold; without them nobody has a limit.

        `num_restored`: so many pages are on disk from the beginning, beside those that fit into the store.
        `num_foreign`: and so many of other models, which never come into memory. `num_on_disk`: so many pages may be
        on disk, those that are restored included; 0: none goes there. `slot_files`: see `OnDisk`.
        """
        self.num_pages = num_pages = num_pages_of(store.num_pages, num_restored, num_on_disk)
        """Pages of the running model that there may be, in memory or on disk."""
        self.num_numbers = num_numbers = num_pages + num_foreign
        """Pages that there may be of all models, in memory or on disk. `grow` raises both."""
        # Longer than the pool: slice a column by `top` or `num_numbers`.
        self._columns = columns = Columns("page_columns", num_numbers)
        self.core = core = ffi.gc(ffi.new("core_pool *"), lib.core_close)
        columns.tell(core.page)
        self.rows = Columns("row_columns", _FIRST_ROWS, MOST_ROWS)
        """Of files: see `kvfs.tiers.residents`."""
        self.rows.tell(core.row)
        core.row_room = _FIRST_ROWS
        self.accounts = Accounts(num_numbers, store.page_bytes) if accounts is None else accounts
        self.store = Frames(store, columns, core)
        """The pages that are in memory, by number."""
        self.on_disk = OnDisk(columns, slot_files)
        self.num_frames = store.num_pages
        """Frames of the store: so many pages may be in memory."""
        self.page_bytes = store.page_bytes
        self._references = Counts(num_numbers, core, "references", floor=1, of=columns["refcount"])
        self.refcount = self._references.all
        self.arena: npt.NDArray[np.uint8] = columns["arena"]
        self.fill: npt.NDArray[np.int8] = columns["fill"]
        self.num_reserved: npt.NDArray[np.int8] = columns["num_reserved"]
        self.tokens: IntArray = columns["tokens"]
        self.positions: IntArray = columns["positions"]
        self._free = FreeList(num_numbers)
        core.numbers = self._free.core
        self._bytes_in = self.store.bytes_in
        self.digests: npt.NDArray[np.uint8] = columns["digest"]
        self.has_digest: npt.NDArray[np.bool_] = columns["has_digest"]
        self._pins = Counts(num_numbers, core, "pins", of=columns["pins"])
        self.pins = self._pins.all
        self.last_use: npt.NDArray[np.float64] = columns["last_use"]
        self.kept = Kept(columns["kept_until"])
        """Pages that keep their frames by advice."""
        self.row_of: Numbers = columns["row"]
        self.bell = Bell()
        """Rings for the pager: few frames are free, or pages were let go that may be awaited."""
        self.cold: ColdPages = NoColdPages(self.store)
        """The reader of pages that are not in memory."""

    @property
    def num_free(self) -> int:
        """Pages that there is room for, in memory or on disk."""
        return self._free.count

    @property
    def top(self) -> int:
        """No page from there on was ever referred to."""
        return self._references.top

    @property
    def num_shared(self) -> int:
        """Pages with more than one reference."""
        return self._references.num_above

    @property
    def num_pinned(self) -> int:
        """Pages that keep their frames for somebody."""
        return self._pins.num_above

    @property
    def num_in_memory(self) -> int:
        """Pages that have a frame."""
        return self.num_frames - self.store.free.count - int(self.core.num_coming)

    @property
    def num_free_frames(self) -> int:
        """Pages that there is room for in memory, for whoever comes now."""
        return self.store.free.count - int(self.core.num_promised)

    def grow(self, num_numbers: int) -> None:
        """Grow to so many numbers; the new ones are for pages of the running model. No page moves."""
        assert num_numbers >= self.num_numbers
        self._columns.grow(num_numbers)
        self.accounts.grow(num_numbers)
        self._references.grow(num_numbers)
        self._pins.grow(num_numbers)
        self._free.grow(num_numbers)
        self.core.numbers = self._free.core
        self.num_pages += num_numbers - self.num_numbers
        self.num_numbers = num_numbers

    def owners_of(self, pages: IntArray) -> npt.NDArray[np.int64]:
        """Return the owner whose bytes each page holds; a number below 0: several, or the page is not in memory."""
        frames = self.store.of[pages]
        found: npt.NDArray[np.int64] = np.where(frames == NOWHERE, _SEVERAL, self._bytes_in[frames]) - _mark(0)
        return found

    # References

    def allocate(self, count: int, owner: int, frames: IntArray | None = None) -> IntArray:
        """Give out `count` pages with one reference each, in memory; or raise OverQuota or NoSpace and change nothing.

        The caller overwrites every byte and calls `claim`: until then a page may hold bytes of others, and counts as
        dirty if it is freed. `frames`: of `take_frames`, as many.
        """
        account, taken = self.accounts.of(owner), ffi.NULL if frames is None else pointer(frames)
        pages, stale = np.empty(count, np.int32), ffi.new("uint8_t[]", count)
        outcome = lib.core_allocate(self.core, account.core, count, taken, False, pointer(pages), stale)
        self.done(outcome)
        return pages

    def done(self, outcome: int) -> None:
        """Do what is left of a call of the core; OverQuota, NoSpace, and nothing was changed."""
        if self.core.news:
            self.take_news()
        if outcome == lib.CORE_DONE:
            return
        if outcome == lib.CORE_OVER_QUOTA:
            raise self.accounts.of(self.accounts.total.refused).refusal()
        if outcome == lib.CORE_NO_PAGES:
            raise self._full(self.core.num_wanted)
        if outcome == lib.CORE_NO_FRAMES:
            raise NoSpace(
                f"memory is full: {self.core.num_wanted} pages wanted, {self.num_free_frames} of {self.num_frames} are "
                "free; try again, remove files or forks, or start the daemon with more KV memory"
            )
        if outcome == lib.CORE_NO_MEMORY:
            raise MemoryError("no memory for the state of pages")
        raise AssertionError(f"the core was asked for what can't be: {outcome}")

    def take_news(self) -> None:
        """Do Python's part of what the core has done."""
        core = self.core
        news, core.news = core.news, 0
        if not news:
            return
        if news & lib.CORE_RING:
            self.bell.ring()
        if news & lib.CORE_LEFT:
            left = np.frombuffer(ffi.buffer(core.left, core.num_left * _LEFT.itemsize), _LEFT).copy()
            core.num_left = 0
            self.kept.left(left["kept_until"])
            self.on_disk.left(np.sort(left[left["slot"] != NO_SLOT], order="page"))
        if news & lib.CORE_CHARGED:
            told, core.told = core.told, ffi.NULL
            self.accounts.tell(told)

    def require_free(self, count: int, owner: int) -> None:
        """Raise OverQuota or NoSpace unless the owner may have so many pages more, and as many are free."""
        account = self.accounts.of(owner)
        if not lib.core_has_room(account.core, count, self.page_bytes):
            raise account.refusal()
        if count > self.num_free:
            raise self._full(count)

    def _full(self, count: int) -> NoSpace:
        return NoSpace(
            f"the page pool is full: {count} pages wanted, {self.num_free} of {self.num_pages} free; "
            "remove files or forks, or start the daemon with more KV memory, or more --disk"
        )

    def take_frames(self, count: int) -> IntArray:
        """Take free frames, which there are, for pages that are to be read, or for new ones."""
        self.core.num_coming += count
        return self.store.free.take(count)

    def return_frames(self, frames: IntArray) -> None:
        """Give back frames that `take_frames` gave and that got no page; their bytes may be anything."""
        self.core.num_coming -= frames.size
        self._bytes_in[frames] = _SEVERAL
        self.store.free.give(frames)

    def pin(self, pages: IntArray) -> None:
        """Pin pages: they keep their frames until `unpin`."""
        self._pins.add(pages)

    def unpin(self, pages: IntArray) -> None:
        """End a pin of each page."""
        self._pins.subtract(pages)

    def computed(self, pages: IntArray) -> npt.NDArray[np.int8]:
        """Return how many of each page's first slots have an entry, of pages that nothing computes with."""
        entries: npt.NDArray[np.int8] = np.minimum(self.fill[pages], PAGE_ENTRIES - self.num_reserved[pages])
        return entries

    def drop_frames(self, pages: IntArray) -> None:
        """Free the frames of pages that nobody needs in memory, and that are on disk as they are."""
        assert not self.pins[pages].any(), "a page that is needed loses its frame"
        assert self.on_disk.is_kept(pages, self.computed(pages)).all(), "a page loses its frame that is not on disk"
        self.done(lib.core_give_frames(self.core, pointer(pages), pages.size))

    def claim(self, pages: IntArray, owner: int) -> None:
        """Say that every byte of these pages was overwritten, with zeros or bytes of `owner`."""
        self._bytes_in[self.store.frames_of(pages)] = _mark(owner)

    def retain(self, pages: IntArray, owner: int) -> None:
        """Add a reference for each mention of a page, or raise OverQuota and change nothing.

        An owner who holds the pages already has room for them.
        """
        self.done(lib.core_retain(self.core, self.accounts.of(owner).core, pointer(pages), pages.size))

    def release(self, pages: IntArray, owner: int) -> None:
        """Take back a reference of `owner` for each mention of a page; pages without any are free."""
        outcome = lib.core_release(self.core, self.accounts.of(owner).core, pointer(pages), pages.size)
        assert outcome != lib.CORE_BROKEN, f"pages {pages} are no pages, or given back too often"
        self.done(outcome)

    # Pages on disk

    def take_restored(self, count: int, arena: int = RUNNING) -> IntArray:
        """Take numbers for pages that are on disk; `restore_references` says who refers to them."""
        pages = self._free.take(count)
        self.arena[pages] = arena
        return pages

    def restore_references(self, pages: IntArray, owner: int) -> None:
        """Add references to pages of `take_restored`, one for each mention. Nothing is limited: the owner had them."""
        self.done(lib.core_charge(self.accounts.of(owner).core, pointer(pages), pages.size))
        self._references.add(pages)

    def end_bringing(self, pages: IntArray, frames: IntArray, owner: int) -> None:
        """Bind frames, of `take_frames`, to the pages that were read into them.

        Pages that nobody but `owner` refers to are taken for bytes of his alone.
        """
        self.core.num_coming -= frames.size
        self.store.bind(pages, frames)
        is_sole = self.accounts.of(owner).pages.all[pages] == self.refcount[pages]
        self._bytes_in[frames] = np.where(is_sole, _mark(owner), _SEVERAL)

    # Digests

    def digests_of(self, pages: IntArray, checkpoint: Callable[[], None] = lambda: None) -> bytes:
        """Return the digests of full pages, one after the other; those that are missing are computed, and kept.

        For worker threads that hold references on the pages: two that meet write the same digest twice. `checkpoint`
        is called every few pages that are hashed, and may raise to end it.
        """
        missing = pages[~self.has_digest[pages]]
        for first in range(0, len(missing), PAGES_A_LOOK):
            checkpoint()
            group = missing[first : first + PAGES_A_LOOK]
            values = look(self.store, self.cold, group, digests)
            self.keep_digests(group, np.frombuffer(b"".join(values), np.uint8).reshape(-1, DIGEST_BYTES))
        return self.digests[pages].tobytes()

    def keep_digests(self, pages: IntArray, values: npt.NDArray[np.uint8]) -> None:
        """Note the digests of full pages, one a row."""
        self.digests[pages] = values
        self.has_digest[pages] = True  # last: whoever sees it may read the digest

    # The books

    def check_fill(self, pages: IntArray, num_entries: int) -> None:
        """Raise AssertionError unless these pages hold so many entries, all of them below the pages' fills."""
        if len(pages) != pages_for(num_entries):
            raise AssertionError(f"{num_entries} entries are said to be in {len(pages)} pages")
        full, tail = divmod(num_entries, PAGE_ENTRIES)
        fill = self.fill[pages]
        if (fill[:full] != PAGE_ENTRIES).any() or (fill[full:] < tail).any():
            raise AssertionError(f"{num_entries} entries are said to be in pages {pages} filled to {fill}")

    def check(self, *holders: Iterable[PageHolder]) -> None:
        """Raise AssertionError, with the facts, unless exactly these holders account for every reference.

        Takes a few microseconds a holder. `raise` rather than `assert`: it is for production too, `python -O` or not.
        """
        held: list[tuple[int, IntArray]] = []
        for holder in (holder for group in holders for holder in group):
            holder.check()
            held.append((holder.owner, holder.held_pages()))
        self._check_references(np.concatenate([pages for _, pages in held]) if held else np.empty(0, np.int32))
        self.accounts.check_pages(held)

    def _check_references(self, held: IntArray) -> None:
        """Look at the pages that were ever used; the others are free, if their list is sound.

        `columns.h` has the invariants.
        """
        self._free.check()
        counted = np.bincount(held, minlength=max(self.top, self._free.top))
        num = counted.size
        wrong = np.flatnonzero(counted != self.refcount[:num])
        if wrong.size:
            some = wrong[:8]
            raise AssertionError(f"pages {some} have {self.refcount[some]} references, {counted[some]} are held")
        free, unused, is_own = self._free.bitmap(num), counted == 0, self.arena[:num] != NO_ARENA
        wrong = np.flatnonzero(free != (unused & is_own))
        if wrong.size:
            some = wrong[:8]
            raise AssertionError(f"pages {some} are in the free list: {free[some]}; references held: {counted[some]}")
        num_used, num_others = np.count_nonzero(counted[is_own]), np.count_nonzero(~is_own)
        if self._free.count + num_used + num_others != self.num_numbers:
            figures = f"{self._free.count} free + {num_used} used + {num_others} of other models"
            raise AssertionError(f"{figures} != {self.num_numbers} pages")
        self._references.check("shared")
        self._pins.check("pinned")
        self.kept.check()
        self.store.check(num)
        fill, has_digest = self.fill[:num], self.has_digest[:num]
        strange = (fill < 0) | (fill > PAGE_ENTRIES) | (has_digest & (fill != PAGE_ENTRIES))
        strange |= unused & ((fill != 0) | (self.num_reserved[:num] != 0))
        strange |= (unused | ~is_own) & self.store.of.has(slice(num))
        strange |= self.on_disk.strange(unused, is_own)
        wrong = np.flatnonzero(strange)
        if wrong.size:
            some = wrong[:8]
            facts = f"fill {fill[some]}, free {free[some]}, digest {has_digest[some]}, {self.on_disk.facts(some)}"
            raise AssertionError(f"pages {some} contradict themselves: {facts}")


def _mark(owner: int) -> int:
    """Return the mark of an owner in `bytes_in`."""
    return owner + 1
