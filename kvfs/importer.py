"""Makes a KV file from an image: the opposite of a snapshot.

Four moves, so that the slow one can run in a worker thread while the owner of the pool goes on:

    plan = parse_header(image_format, source)            any thread, quick
    incoming = ImageImport(pool, plan, owner)            owner thread: takes the pages, or OverQuota or NoSpace
    incoming.load(source)                                worker thread: reads, checks, fills the pages
    table = incoming.finish()   or   incoming.abandon()  owner thread

Pages that the owner holds already, with the same content, are shared at the end: the import's own go back then. They
are taken first all the same, for what they hold is known only when they are loaded.

Nobody else knows the pages before `finish`, and what was read is checked as it lies in memory: a source that changes
while it is read can fail the import, not fool it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from kvfs.digest import DIGEST_BYTES, NUM_LANES, digests
from kvfs.free_list import IntArray
from kvfs.header import ByteSource, ImagePlan, parse_header, read_exactly
from kvfs.image import ImageFormat, all_finite
from kvfs.pages import PagePool
from kvfs.table import PageTable
from kvfs.twins import Digests, find_twins, true_twins
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid


class ImageImport:
    """An image on its way into the pool. End it with `finish` or `abandon`."""

    __slots__ = ("_digests", "_loaded", "_pages", "_twins", "closed", "owner", "plan", "pool")

    def __init__(self, pool: PagePool, plan: ImagePlan, owner: int) -> None:
        assert plan.image_format.page_bytes == pool.page_bytes
        self.pool = pool
        self.plan = plan
        self.owner = owner
        self.closed = False
        self._loaded = False
        self._digests: list[bytes] = []
        self._twins: IntArray = np.empty(0, np.int32)
        # Not zeroed first: that would take the owner's thread as long as the load takes the worker.
        self._pages: IntArray = pool.allocate(plan.num_pages, owner, overwritten=True)

    def load(self, source: ByteSource, checkpoint: Callable[[], None] = lambda: None) -> None:
        """Read everything and check it; raise Invalid if the content is not what the header promises.

        For a worker thread: touches nothing but the import's own pages. `checkpoint` is called at every page, and may
        raise to end it.
        """
        self._load_pages(source, checkpoint)
        entries = self._load_entries(source)
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        whole.update(b"".join(self._digests))
        whole.update(entries)
        if whole.hexdigest() != self.plan.digest:
            raise Invalid("image is damaged: its content has another digest than its header says")
        self._twins = find_twins(self.pool, self.owner, self._full_pages, self._full_digests)
        self._loaded = True

    def finish(self) -> PageTable:
        """The table of the loaded image; it owns the pages from here on."""
        assert self._loaded
        assert not self.closed
        self.closed = True
        pages, num_entries = self._pages, self.plan.num_entries
        full, tail = divmod(num_entries, PAGE_ENTRIES)
        self.pool.claim(pages, self.owner)
        self.pool.fill[pages] = PAGE_ENTRIES
        if tail:
            self.pool.fill[pages[full]] = tail
        self.pool.keep_digests(self._full_pages, self._full_digests)
        self._share_twins()
        return PageTable.adopt(self.pool, self.owner, pages, num_entries)

    def _share_twins(self) -> None:
        """Refer to pages that the owner holds already instead of to the import's own."""
        pool, own = self.pool, self._full_pages
        chosen = np.flatnonzero(true_twins(pool, self.owner, own, self._full_digests, self._twins))
        spare, twins = own[chosen], self._twins[chosen]
        pool.retain(twins, self.owner)
        own[chosen] = twins
        pool.release(spare, self.owner)

    def abandon(self) -> None:
        """Give the pages back."""
        assert not self.closed
        self.closed = True
        self.pool.release(self._pages, self.owner)

    @property
    def _full_pages(self) -> IntArray:
        """A view."""
        return self._pages[: self.plan.num_entries // PAGE_ENTRIES]

    @property
    def _full_digests(self) -> Digests:
        num_full = len(self._full_pages)
        return np.frombuffer(b"".join(self._digests[:num_full]), np.uint8).reshape(num_full, DIGEST_BYTES)

    def _load_pages(self, source: ByteSource, checkpoint: Callable[[], None]) -> None:
        store, page_bytes, dtype = self.pool.store, self.pool.page_bytes, self.plan.image_format.dtype
        offset = self.plan.layout.pages
        pages = self._pages.tolist()
        for first in range(0, len(pages), NUM_LANES):
            views = [store.writable(page) for page in pages[first : first + NUM_LANES]]
            for index, view in enumerate(views, first):
                checkpoint()
                if (num_read := source.read_into(offset, view)) != page_bytes:
                    raise Invalid(f"image is cut short: {num_read} of {page_bytes} bytes at offset {offset}")
                if not all_finite(view, dtype):  # it would reach what must not see it: zero times infinity is not zero
                    raise Invalid(f"image is damaged: its page {index} holds numbers that are not finite")
                offset += page_bytes
            self._digests += digests(views)
        tail = self.plan.num_entries % PAGE_ENTRIES
        if tail:
            last = int(self._pages[-1])
            if store.head(last, tail) != store.view(last):
                raise Invalid(f"image is damaged: its last page holds bytes past entry {self.plan.num_entries}")

    def _load_entries(self, source: ByteSource) -> bytes:
        """Tokens and positions into their pages; their bytes come back."""
        plan, facts = self.plan, self.plan.image_format.facts
        data = read_exactly(source, plan.layout.tokens, 8 * plan.num_entries)
        tokens, positions = np.frombuffer(data, "<i4").reshape(2, plan.num_entries)
        _check_range("token id", tokens, facts.vocab_size)
        _check_range("position", positions, facts.max_positions)
        for target, values in ((self.pool.tokens, tokens), (self.pool.positions, positions)):
            padded = np.zeros(plan.num_pages * PAGE_ENTRIES, np.int32)
            padded[: plan.num_entries] = values
            target[self._pages] = padded.reshape(plan.num_pages, PAGE_ENTRIES)
        return data

    # The books

    def held_pages(self) -> IntArray:
        return self._pages[:0] if self.closed else self._pages

    def check(self) -> None:
        """Nothing beside its references: nobody sees an import's pages before it ends."""


def import_image(pool: PagePool, image_format: ImageFormat, source: ByteSource, owner: int) -> PageTable:
    """All of an import in one thread: the table of a whole, valid image, or an error and nothing changed."""
    incoming = ImageImport(pool, parse_header(image_format, source), owner)
    try:
        incoming.load(source)
    except BaseException:
        incoming.abandon()
        raise
    return incoming.finish()


def _check_range(name: str, values: IntArray, limit: int) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if wrong.size:
        raise Invalid(f"image is damaged: entry {wrong[0]} has {name} {values[wrong[0]]}, out of 0..{limit - 1}")
