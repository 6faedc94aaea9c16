"""The pool: every page's reference count, fill, owner, entries and digest.

Any number of tables and snapshots may share a page, and a page without references is free. `kvfs/core/core.h` has the
rules that make the sharing safe. An owner is an account. Each reference has an owner, which is charged for the page.

The daemon's trio thread owns the pool: only it calls functions that change a reference count or a fill. A worker thread
that holds references on pages, for example by a snapshot, may do two things: call `digests_of` for full pages, and read
entries below their fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import trio

from kvfs._pages import ffi, lib
from kvfs.base.bell import Bell
from kvfs.pages.accounts import Accounts
from kvfs.pages.columns import MOST_ROWS, Columns, Numbers
from kvfs.pages.counts import Counts
from kvfs.pages.digest import DIGEST_BYTES, NUM_LANES, digests
from kvfs.pages.frames import NOWHERE, Frames
from kvfs.pages.free_list import FreeList, IntArray, pointer
from kvfs.pages.kept import KeptPages
from kvfs.pages.looking import ColdPages, NoColdPages, look
from kvfs.pages.page_slots import NO_SLOT, NoSlotFiles, PageSlots, SlotFiles
from kvfs.pages.store import PageStore
from libsym.abi import PAGE_ENTRIES
from libsym.errors import NoSpace

PAGES_A_LOOK = 2 * NUM_LANES
"""Pages that are read and hashed together. Pages on disk take one read."""

_SEVERAL = -1
"""The mark of a frame with bytes of several owners, or of an unknown owner. The frame is zeroed before any account gets
it.
"""


_FIRST_ROWS = 1 << 12
_LEFT = np.dtype([("page", "i4"), ("slot", "i4"), ("kept_until", "f8")])
"""The layout of `core_left`."""
NO_ROW = -1
"""Stands for a row when no open file has used the page."""

RUNNING, NO_ARENA = 0, 255
"""Numbers of arenas: the arena of the running model, and the number that stands for other models, whose pages are on
disk alone.
"""


def num_pages_of(num_frames: int, num_restored: int, num_on_disk: int) -> int:
    """Return the largest possible number of the running model's pages: see `PagePool`.

    If pages may go to disk, the disk has room for every page, so that any page in memory can be evicted. Otherwise
    every page fits in memory.
    """
    return max(num_frames, num_restored, num_on_disk) if num_on_disk else num_frames + num_restored


def pages_for(num_entries: int) -> int:
    """Return how many pages hold `num_entries` entries."""
    return -(-num_entries // PAGE_ENTRIES)


class PageHolder(Protocol):
    """A holder of references on pages: a table, a snapshot, an import under way."""

    @property
    def owner(self) -> int:
        """The account that is charged for the pages."""
        ...

    def held_pages(self) -> IntArray:
        """Return every page that the holder refers to, once for each reference."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the holder contradicts itself or its pool."""
        ...


class PagePool:
    """The pages of one store. Tables, snapshots and imports take and release references here."""

    def __init__(
        self,
        store: PageStore,
        accounts: Accounts | None = None,
        num_restored: int = 0,
        num_foreign: int = 0,
        num_on_disk: int = 0,
        slot_files: Callable[[], SlotFiles] = NoSlotFiles,
        base: int = 0,
        number: int = 0,
    ) -> None:
        """`accounts` has the limits; without `accounts` there are no limits. Several pools may have the same accounts,
        which know page p of a pool as page `base` + p.

        `num_restored` pages are on disk from the beginning, in addition to the pages that fit into the store.
        `num_foreign` pages belong to other models, and are never in memory. `num_on_disk` pages may be on disk,
        including restored pages; 0: the pool writes no page to disk. `slot_files`: see `PageSlots`.
        """
        self.num_pages = num_pages = num_pages_of(store.num_pages, num_restored, num_on_disk)
        """The most pages of the running model, in memory or on disk."""
        self.num_numbers = num_numbers = num_pages + num_foreign
        """Page numbers of all models, in memory or on disk."""
        self._columns = columns = Columns("page_columns", num_numbers)
        self.core = core = ffi.gc(ffi.new("core_pool *"), lib.core_close)
        columns.tell(core.page)
        self.rows = Columns("row_columns", _FIRST_ROWS, MOST_ROWS)
        """Rows of files: see `kvfs.tiers.residents`."""
        self.rows.tell(core.row)
        core.row_room = _FIRST_ROWS
        self.accounts = Accounts(num_numbers, store.page_bytes) if accounts is None else accounts
        assert base + num_numbers <= self.accounts.num_pages, "accounts have no numbers for the pages"
        self.base = core.base = base
        self.number = number
        """The number of the pool, and of the served model whose pages it has."""
        core.page_bytes = store.page_bytes
        if base:
            self.has_size(0, num_numbers, store.page_bytes)
        self.store = Frames(store, columns, core)
        """Frames, and the pages in them."""
        self.on_disk = PageSlots(columns, slot_files)
        self.num_frames = store.num_pages
        """Frames of the store: the most pages that can be in memory."""
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
        self.kept = KeptPages(columns["kept_until"])
        """Pages that advice keeps in their frames."""
        self.row_of: Numbers = columns["row"]
        self.bell = Bell()
        """Wakes the pager: few frames are free, or pages were released that a call may await."""
        self.changed = trio.Event()
        """Set at the next change of a file that a call waits for, and then replaced."""
        self.cold: ColdPages = NoColdPages(self.store)
        """The reader of pages that are not in memory."""

    @property
    def num_free(self) -> int:
        """Number of free page numbers: this many more pages fit into memory or on disk."""
        return self._free.count

    @property
    def top(self) -> int:
        """The lowest page number above all pages that ever had a reference."""
        return self._references.top

    @property
    def num_shared(self) -> int:
        """Pages with more than one reference."""
        return self._references.num_above

    @property
    def num_pinned(self) -> int:
        """Pages that are pinned to their frames."""
        return self._pins.num_above

    @property
    def num_in_memory(self) -> int:
        """Pages that have a frame."""
        return self.num_frames - self.store.free.count - int(self.core.num_coming)

    @property
    def num_free_frames(self) -> int:
        """Number of free frames that are available to the next call."""
        return self.store.free.count - int(self.core.num_promised)

    def owners_of(self, pages: IntArray) -> npt.NDArray[np.int64]:
        """Return the owner of each page's bytes. Below 0: there are several owners, or the page is not in memory."""
        frames = self.store.of[pages]
        found: npt.NDArray[np.int64] = np.where(frames == NOWHERE, _SEVERAL, self._bytes_in[frames]) - _mark(0)
        return found

    def has_size(self, first: int, stop: int, page_bytes: int) -> None:
        """Note the size of the pages from `first` to `stop - 1`."""
        self.accounts.sizes.add(self.base + first, self.base + stop, page_bytes)

    def size_of(self, pages: IntArray) -> int:
        """Return the size in bytes of each of these pages, which belong to one file."""
        return self.accounts.sizes.of(pages, self.base)

    def total_bytes(self, counts: npt.NDArray[np.integer]) -> int:
        """Return the bytes of all pages with a count other than zero. The first count is of page 0."""
        return self.accounts.sizes.total(counts, self.base)

    # References

    def allocate(self, count: int, owner: int, frames: IntArray | None = None) -> IntArray:
        """Allocate `count` pages in memory with one reference each, or raise OverQuota or NoSpace and change nothing.

        The caller overwrites every byte and then calls `claim`. Until then a page may hold other accounts' bytes, even
        if it is freed before. `frames`, from `take_frames`, are `count` frames for the pages.
        """
        account, taken = self.accounts.of(owner), ffi.NULL if frames is None else pointer(frames)
        pages, stale = np.empty(count, np.int32), ffi.new("uint8_t[]", count)
        outcome = lib.core_allocate(self.core, account.core, count, taken, False, pointer(pages), stale)
        self.done(outcome)
        return pages

    def done(self, outcome: int) -> None:
        """Finish a call of the core: handle its news, and raise OverQuota or NoSpace if the core refused."""
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
        raise AssertionError(f"an invalid call of the core: {outcome}")

    def take_news(self) -> None:
        """Do the work that the core has left to Python in `news`."""
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
        if news & lib.CORE_CHANGED:
            self.changed.set()
            self.changed = trio.Event()
        if news & lib.CORE_CHARGED:
            told, core.told = core.told, ffi.NULL
            self.accounts.tell(told)

    def require_free(self, count: int, owner: int) -> None:
        """Raise OverQuota or NoSpace unless the owner may have `count` more pages, and `count` pages are free."""
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
        """Take `count` frames, which must be free, for new pages or for pages that will be read."""
        self.core.num_coming += count
        return self.store.free.take(count)

    def return_frames(self, frames: IntArray) -> None:
        """Give back frames of `take_frames` that got no page. Their bytes may belong to any account."""
        self.core.num_coming -= frames.size
        self._bytes_in[frames] = _SEVERAL
        self.store.free.give(frames)

    def pin(self, pages: IntArray) -> None:
        """Pin pages: they keep their frames until `unpin`."""
        self._pins.add(pages)

    def unpin(self, pages: IntArray) -> None:
        """End one pin of each page."""
        self._pins.subtract(pages)

    def computed(self, pages: IntArray) -> npt.NDArray[np.int8]:
        """Return how many entries at the start of each page are computed. No step may be computing with the pages."""
        entries: npt.NDArray[np.int8] = np.minimum(self.fill[pages], PAGE_ENTRIES - self.num_reserved[pages])
        return entries

    def drop_frames(self, pages: IntArray) -> None:
        """Free the frames of pages. The pages are not pinned, and all their computed entries are on disk."""
        assert not self.pins[pages].any(), "a page that is needed loses its frame"
        assert self.on_disk.is_kept(pages, self.computed(pages)).all(), "a page loses its frame that is not on disk"
        self.done(lib.core_give_frames(self.core, pointer(pages), pages.size))

    def claim(self, pages: IntArray, owner: int) -> None:
        """Mark pages whose every byte was overwritten with zeros or with bytes of `owner`."""
        self._bytes_in[self.store.frames_of(pages)] = _mark(owner)

    def retain(self, pages: IntArray, owner: int) -> None:
        """Add a reference for each mention of a page, or raise OverQuota and change nothing.

        An owner that already refers to the pages always has room for them.
        """
        self.done(lib.core_retain(self.core, self.accounts.of(owner).core, pointer(pages), pages.size))

    def release(self, pages: IntArray, owner: int) -> None:
        """Release a reference of `owner` for each mention of a page. Pages without references become free."""
        outcome = lib.core_release(self.core, self.accounts.of(owner).core, pointer(pages), pages.size)
        assert outcome != lib.CORE_BROKEN, f"pages {pages} are no pages, or given back too often"
        self.done(outcome)

    # Pages on disk

    def take_restored(self, count: int, arena: int = RUNNING) -> IntArray:
        """Take page numbers for pages that are on disk. Then `restore_references` adds their references."""
        pages = self._free.take(count)
        self.arena[pages] = arena
        return pages

    def restore_references(self, pages: IntArray, owner: int) -> None:
        """Add references to pages of `take_restored`, one for each mention. No limit applies, because the owner had
        these pages before.
        """
        self.done(lib.core_charge(self.accounts.of(owner).core, self.base, pointer(pages), pages.size))
        self._references.add(pages)

    def end_bringing(self, pages: IntArray, frames: IntArray, owner: int) -> None:
        """Bind frames of `take_frames` to the pages that were read into them.

        If `owner` has all references to a page, the bytes of the page count as that owner's alone.
        """
        self.core.num_coming -= frames.size
        self.store.bind(pages, frames)
        is_sole = self.accounts.of(owner).pages.all[self.base + pages] == self.refcount[pages]
        self._bytes_in[frames] = np.where(is_sole, _mark(owner), _SEVERAL)

    # Digests

    def digests_of(self, pages: IntArray, checkpoint: Callable[[], None] = lambda: None) -> bytes:
        """Return the digests of full pages, one after the other. Missing digests are computed and stored.

        Worker threads that hold references on the pages may call this. Two workers that race write the same digest.
        `checkpoint` is called between groups of pages, and may raise to end the work.
        """
        missing = pages[~self.has_digest[pages]]
        for first in range(0, len(missing), PAGES_A_LOOK):
            checkpoint()
            group = missing[first : first + PAGES_A_LOOK]
            values = look(self.store, self.cold, group, digests)
            self.keep_digests(group, np.frombuffer(b"".join(values), np.uint8).reshape(-1, DIGEST_BYTES))
        return self.digests[pages].tobytes()

    def keep_digests(self, pages: IntArray, values: npt.NDArray[np.uint8]) -> None:
        """Store the digests of full pages, one in each row."""
        self.digests[pages] = values
        self.has_digest[pages] = True  # set last, because a thread that sees the flag may read the digest

    # The audit

    def check_fill(self, pages: IntArray, num_entries: int) -> None:
        """Raise AssertionError unless there are as many pages as `num_entries` entries need, and each page is filled at
        least as far as these entries reach.
        """
        if len(pages) != pages_for(num_entries):
            raise AssertionError(f"{num_entries} entries are said to be in {len(pages)} pages")
        full, tail = divmod(num_entries, PAGE_ENTRIES)
        fill = self.fill[pages]
        if (fill[:full] != PAGE_ENTRIES).any() or (fill[full:] < tail).any():
            raise AssertionError(f"{num_entries} entries are said to be in pages {pages} filled to {fill}")

    def check(self, *holders: Iterable[PageHolder]) -> None:
        """Raise AssertionError unless these holders account for every reference. No other pool has these accounts."""
        self.accounts.check_pages(self.held(*holders))

    def held(self, *holders: Iterable[PageHolder]) -> list[tuple[int, IntArray]]:
        """Return pairs of an account number and pages that the account holds, by the numbers that accounts know. Raise
        AssertionError unless these holders have every reference of the pool.

        This takes a few microseconds for each holder. The method has no `assert`, so that it works under `python -O`.
        """
        held: list[tuple[int, IntArray]] = []
        for holder in (holder for group in holders for holder in group):
            holder.check()
            held.append((holder.owner, holder.held_pages()))
        self._check_references(np.concatenate([pages for _, pages in held]) if held else np.empty(0, np.int32))
        return [(owner, self.base + pages) for owner, pages in held]

    def _check_references(self, held: IntArray) -> None:
        """Check the pages that were ever used. The other pages are free, if the free list is sound.

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
