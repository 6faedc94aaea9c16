"""Import: makes a KV file from an image. (The reverse, an image made from a KV file, is a snapshot.)

The work has four parts, so that a worker thread can do the slow part while the owner of the pool goes on:

    plan = parse_header(image_format, source)            any thread, quick
    incoming = ImageImport(pool, plan, owner)            owner thread: allocates pages, or raises OverQuota or NoSpace
    incoming.load(source)                                worker thread: reads, checks, fills the pages
    table = incoming.finish()   or   incoming.abandon()  owner thread

If the owner already has a page with the same content, the import shares that page at the end, and frees its own page.
The import's own pages have to be allocated first, because their content is known only after loading. The import's own
pages stay in memory until the end. If the pool has no room for these pages, `survey` reads the image first, in a
worker, and finds the full pages that the owner already has. Then ImageImport refers to these pages from the beginning,
and allocates only the other pages.

No other code knows the pages before `finish`, and the content is checked as it lies in memory. So a source that changes
during the import can make the import fail, but can't make it accept bad content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvfs.images.format import all_finite
from kvfs.images.header import ByteSource, ImagePlan, read_exactly
from kvfs.pages.digest import DIGEST_BYTES, NUM_LANES, digests
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from kvfs.pages.twins import Digests, Entries, find_twins, true_twins
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid


@dataclass(frozen=True, slots=True)
class Survey:
    """Digests of an image's full pages, and the pages of the pool that are likely twins."""

    entries: Entries
    digests: Digests
    twins: IntArray


def survey(
    pool: PagePool, plan: ImagePlan, owner: int, source: ByteSource, checkpoint: Callable[[], None] = lambda: None
) -> Survey:
    """Read an image for which the pool has no room. A worker thread calls this, so the result is a guess that is
    checked later.
    """
    num_full = plan.num_entries // PAGE_ENTRIES
    room = bytearray(NUM_LANES * pool.page_bytes)
    found: list[bytes] = []
    for first in range(0, num_full, NUM_LANES):
        checkpoint()
        num_now = min(NUM_LANES, num_full - first)
        view = memoryview(room)[: num_now * pool.page_bytes]
        if source.read_into(plan.layout.pages + first * pool.page_bytes, view) != len(view):
            raise Invalid(f"image is cut short: it ends before its page {first + num_now}")
        found += digests([view[at : at + pool.page_bytes] for at in range(0, len(view), pool.page_bytes)])
    data = read_exactly(source, plan.layout.tokens, 8 * plan.num_entries)
    numbers = np.frombuffer(data, "<i4").reshape(2, plan.num_entries)[:, : num_full * PAGE_ENTRIES]
    tokens, positions = numbers.reshape(2, num_full, PAGE_ENTRIES)
    known, values = Entries(tokens, positions), _as_digests(found)
    return Survey(known, values, find_twins(pool, owner, known, values))


def num_pages_to_take(pool: PagePool, plan: ImagePlan, owner: int, surveyed: Survey | None) -> int:
    """Return how many pages an import would allocate if it began now."""
    return plan.num_pages - _there(pool, owner, surveyed).size


def _there(pool: PagePool, owner: int, surveyed: Survey | None) -> npt.NDArray[np.intp]:
    """Return which of the surveyed full pages are in the pool now."""
    if surveyed is None:
        return np.empty(0, np.intp)
    return np.flatnonzero(true_twins(pool, owner, surveyed.entries, surveyed.digests, surveyed.twins))


class ImageImport:
    """An import of an image into the pool. `finish` or `abandon` ends it."""

    __slots__ = ("_digests", "_is_own", "_loaded", "_pages", "_taken", "_twins", "closed", "owner", "plan", "pool")

    def __init__(
        self,
        pool: PagePool,
        plan: ImagePlan,
        owner: int,
        surveyed: Survey | None = None,
        frames: IntArray | None = None,
    ) -> None:
        """Allocate pages, except those that the survey has found in the pool; or raise OverQuota or NoSpace.

        `frames` are from `take_frames`, as many as `num_pages_to_take` returned.
        """
        assert plan.image_format.page_bytes == pool.page_bytes
        self.pool = pool
        self.plan = plan
        self.owner = owner
        self.closed = False
        self._loaded = False
        self._digests: list[bytes] = []
        self._taken: dict[int, bytes] = {}
        """Digests of the pages that `take` has loaded, by index."""
        self._twins: IntArray = np.empty(0, np.int32)
        self._pages: IntArray = np.empty(plan.num_pages, np.int32)
        self._is_own = np.ones(plan.num_pages, np.bool_)
        """For each page, whether the import has allocated it. Other pages are shared from the beginning."""
        there = _there(pool, owner, surveyed)
        if surveyed is not None:
            self._pages[there], self._is_own[there] = surveyed.twins[there], False
        # The pages are not zeroed first: zeroing would take the owner's thread as long as loading takes the worker.
        self._pages[self._is_own] = pool.allocate(self.num_own_pages, owner, frames)
        pool.pin(self._pages[self._is_own])
        pool.retain(self._pages[~self._is_own], owner)

    def take(self, numbers: npt.NDArray[np.intp], wanted: Digests, read: Callable[[int, memoryview], object]) -> int:
        """Load some of the missing full pages from a place that may be wrong, and return how many were right. `load`
        reads the others. `read` gets a position in `numbers`, and the page. A worker thread may call this method.
        """
        views = [self.pool.store.writable(page) for page in self._pages[numbers].tolist()]
        for place, view in enumerate(views):
            read(place, view)
        found = zip(numbers.tolist(), views, digests(views), wanted, strict=True)
        right = {
            number: value
            for number, view, value, promised in found
            if value == promised.tobytes() and all_finite(view, self.plan.image_format.dtype)
        }
        self._taken |= right
        return len(right)

    def load(self, source: ByteSource, checkpoint: Callable[[], None] = lambda: None) -> None:
        """Read and check everything. Raise Invalid if the content is not what the header promises.

        A worker thread may call this method, because it changes only the import's own pages. `checkpoint` is called at
        every page, and may raise to end the import.
        """
        self._load_pages(source, checkpoint)
        entries = self._load_entries(source)
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        whole.update(b"".join(self._digests))
        whole.update(entries)
        if whole.hexdigest() != self.plan.digest:
            raise Invalid("image is damaged: its content has another digest than its header says")
        loaded = Entries.of(self.pool, self._full_pages)
        self._twins = find_twins(self.pool, self.owner, loaded, self._full_digests)
        self._loaded = True

    def finish(self) -> PageTable:
        """Return the table of the loaded image. The table owns the pages from then on."""
        assert self._loaded
        assert not self.closed
        self.closed = True
        pages, num_entries = self._pages, self.plan.num_entries
        full, tail = divmod(num_entries, PAGE_ENTRIES)
        own = pages[self._is_own]
        self.pool.unpin(own)
        self.pool.claim(own, self.owner)
        self.pool.fill[own] = PAGE_ENTRIES
        if tail:
            self.pool.fill[pages[full]] = tail
        self.pool.keep_digests(self._full_pages, self._full_digests)
        self._share_twins()
        return PageTable(self.pool, self.owner, pages, num_entries)

    def _share_twins(self) -> None:
        """Replace the import's own pages by twins that the owner already has."""
        pool, own = self.pool, self._full_pages
        is_twin = true_twins(pool, self.owner, Entries.of(pool, own), self._full_digests, self._twins)
        chosen = np.flatnonzero(is_twin & self._is_own[: len(own)])
        spare, twins = own[chosen], self._twins[chosen]
        pool.retain(twins, self.owner)
        own[chosen] = twins
        pool.release(spare, self.owner)

    def abandon(self) -> None:
        """Free the pages."""
        assert not self.closed
        self.closed = True
        self.pool.unpin(self._pages[self._is_own])
        self.pool.release(self._pages, self.owner)

    @property
    def _full_pages(self) -> IntArray:
        """The numbers of the full pages, as a view."""
        return self._pages[: self.plan.num_entries // PAGE_ENTRIES]

    @property
    def _full_digests(self) -> Digests:
        return _as_digests(self._digests[: len(self._full_pages)])

    def _load_pages(self, source: ByteSource, checkpoint: Callable[[], None]) -> None:
        store, page_bytes, dtype = self.pool.store, self.pool.page_bytes, self.plan.image_format.dtype
        pages = self._pages.tolist()
        self._digests = [self.pool.digests[page].tobytes() for page in pages]  # the digests of shared pages are valid
        for index, value in self._taken.items():
            self._digests[index] = value
        own = self.missing_numbers.tolist()
        for first in range(0, len(own), NUM_LANES):
            group = own[first : first + NUM_LANES]
            views = [store.writable(pages[index]) for index in group]
            for index, view in zip(group, views, strict=True):
                checkpoint()
                offset = self.plan.layout.pages + index * page_bytes
                if (num_read := source.read_into(offset, view)) != page_bytes:
                    raise Invalid(f"image is cut short: {num_read} of {page_bytes} bytes at offset {offset}")
                if not all_finite(view, dtype):  # infinity would spoil a sum even with the weight 0
                    raise Invalid(f"image is damaged: its page {index} holds numbers that are not finite")
            for index, value in zip(group, digests(views), strict=True):
                self._digests[index] = value
        tail = self.plan.num_entries % PAGE_ENTRIES
        if tail:
            last = store.view(pages[-1])
            if store.store.masked(last, tail) != last:
                raise Invalid(f"image is damaged: its last page holds bytes past entry {self.plan.num_entries}")

    def _load_entries(self, source: ByteSource) -> bytes:
        """Write tokens and positions into their pages. Return their bytes."""
        plan, facts = self.plan, self.plan.image_format.facts
        data = read_exactly(source, plan.layout.tokens, 8 * plan.num_entries)
        tokens, positions = np.frombuffer(data, "<i4").reshape(2, plan.num_entries)
        _check_range("token id", tokens, facts.vocab_size)
        _check_range("position", positions, facts.max_positions)
        for target, values in ((self.pool.tokens, tokens), (self.pool.positions, positions)):
            padded = np.zeros(plan.num_pages * PAGE_ENTRIES, np.int32)
            padded[: plan.num_entries] = values
            target[self._pages[self._is_own]] = padded.reshape(plan.num_pages, PAGE_ENTRIES)[self._is_own]
        return data

    # The audit

    @property
    def num_own_pages(self) -> int:
        """Number of pages that the import itself has allocated."""
        return int(self._is_own.sum())

    @property
    def missing_numbers(self) -> npt.NDArray[np.intp]:
        """Indexes, in the image's list of pages, of the pages that `load` has to read."""
        is_missing = self._is_own.copy()
        is_missing[list(self._taken)] = False
        return np.flatnonzero(is_missing)

    def held_pages(self) -> IntArray:
        return self._pages[:0] if self.closed else self._pages

    def check(self) -> None:
        """Do nothing: the audit counts the references, and other code sees the pages only after the import ends."""


def _as_digests(found: Sequence[bytes]) -> Digests:
    return np.frombuffer(b"".join(found), np.uint8).reshape(len(found), DIGEST_BYTES)


def _check_range(name: str, values: IntArray, limit: int) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if wrong.size:
        raise Invalid(f"image is damaged: entry {wrong[0]} has {name} {values[wrong[0]]}, out of 0..{limit - 1}")
