"""A reader's view of a KV file: the image as it was at open, whatever happens to the file afterwards.

A snapshot holds a reference on each page, so no page is freed or rewritten below the snapshot's end. Slots past its
end, where another table may be appending, are masked. Nothing is copied at open but page numbers, and the bytes of
full pages are given out as they lie in the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvfs.images.format import ImageFormat
from kvfs.pages.digest import digest
from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.abi import PAGE_ENTRIES

Bytes: TypeAlias = bytes | memoryview


@dataclass(frozen=True, slots=True)
class _Computed:
    """The parts of an image that are not pages of the store."""

    header: bytes
    tail: bytes
    """The last page with zeros past the end; empty when the last page is full."""
    entries: bytes
    """Tokens, then positions."""


class Snapshot:
    """The image of a table's committed entries. Made and closed by the thread that owns the pool.

    `prepare` and `read` may be called from worker threads, several at once; all of them, and all use of the views
    that `read` gave out, must be over before `close`.
    """

    __slots__ = ("_computed", "_lock", "_num_full", "_pages", "closed", "image_format", "layout", "owner", "pool")

    def __init__(self, table: PageTable, image_format: ImageFormat) -> None:
        assert not table.closed
        self.pool: PagePool = table.pool
        self.owner = table.owner
        """Who is charged: the file's account, also after the file changed hands."""
        self.image_format = image_format
        self.layout = image_format.layout(table.length)
        self.closed = False
        self._pages: IntArray = table.pages.copy()
        self._num_full = table.length // PAGE_ENTRIES
        self._computed: _Computed | None = None
        self._lock = threading.Lock()
        self.pool.retain(self._pages, self.owner)

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def reads_disk(self) -> bool:
        """Whether some of its pages are on disk alone: then `read` may take its time."""
        return not self.pool.are_in_memory(self._pages)

    def prepare(self, checkpoint: Callable[[], None] = lambda: None) -> None:
        """Compute the digests and the header once: at about 1 GB/s for pages that nobody has hashed before.

        The first `read` does it unasked. Call it from a worker thread, before reads that must be quick. `checkpoint`
        is called at every page, and may raise to end it.
        """
        self._compute(checkpoint)

    def read(self, offset: int, size: int) -> Bytes:
        """Up to `size` bytes of the image; empty past its end.

        A view into the store, without a copy, when the range lies in consecutive full pages.
        """
        assert not self.closed
        assert min(offset, size) >= 0
        end = min(offset + size, self.size)
        page, begin = divmod(offset - self.layout.pages, self.image_format.page_bytes)
        if 0 <= page < self._num_full and end - offset <= self.image_format.page_bytes - begin:
            self._compute()
            return self.pool.bytes_of(int(self._pages[page]))[begin : begin + end - offset]
        parts = list(self._parts(offset, end))
        if len(parts) == 1:
            return parts[0]
        return b"".join(parts)

    def close(self) -> None:
        """Give the pages back."""
        assert not self.closed
        assert not self._lock.locked(), "closed while a worker was preparing it"
        self.closed = True
        self.pool.release(self._pages, self.owner)

    # Reading

    def _parts(self, begin: int, end: int) -> Iterator[Bytes]:
        """The bytes from `begin` to `end`, in the largest pieces that lie together."""
        computed = self._compute()
        pages_at, tokens_at = self.layout.pages, self.layout.tokens
        tail_at = pages_at + self._num_full * self.image_format.page_bytes
        if begin < min(end, pages_at):
            yield computed.header[begin:end]
        if max(begin, pages_at) < min(end, tail_at):
            yield from self._full_pages(max(begin, pages_at) - pages_at, min(end, tail_at) - pages_at)
        if max(begin, tail_at) < min(end, tokens_at):
            yield memoryview(computed.tail)[max(begin - tail_at, 0) : end - tail_at]
        if max(begin, tokens_at) < end:
            yield memoryview(computed.entries)[max(begin - tokens_at, 0) : end - tokens_at]

    def _full_pages(self, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes of full pages, offsets counted from the first page's; consecutive pages come as one view."""
        page_bytes = self.image_format.page_bytes
        first, stop = begin // page_bytes, -(-end // page_bytes)
        pages = self._pages[first:stop]
        frames = self.pool.store.of[pages]
        cuts = (np.flatnonzero((np.diff(frames) != 1) | (frames[:-1] == NOWHERE)) + 1).tolist()
        for run_first, run_stop in zip([0, *cuts], [*cuts, len(pages)], strict=True):
            view = self._view(pages[run_first:run_stop])
            run_begin = (first + run_first) * page_bytes
            yield view[max(begin - run_begin, 0) : end - run_begin]

    def _view(self, pages: IntArray) -> memoryview:
        """Of a page, or of several that lie together."""
        first = int(pages[0])
        return self.pool.bytes_of(first) if len(pages) == 1 else self.pool.store.view(first, len(pages))

    def _compute(self, checkpoint: Callable[[], None] = lambda: None) -> _Computed:
        if self._computed is None:
            with self._lock:
                if self._computed is None:  # another worker may have been first
                    self._computed = self._computed_parts(checkpoint)
        return self._computed

    def _computed_parts(self, checkpoint: Callable[[], None]) -> _Computed:
        num_entries = self.layout.num_entries
        tail_entries = num_entries % PAGE_ENTRIES
        digests = self.pool.digests_of(self._pages[: self._num_full], checkpoint)
        tail = b""
        if tail_entries:
            tail = self.pool.head_of(int(self._pages[-1]), tail_entries)
            digests += digest(tail)
        tokens = self.pool.tokens[self._pages].reshape(-1)[:num_entries]
        positions = self.pool.positions[self._pages].reshape(-1)[:num_entries]
        entries = tokens.astype("<i4").tobytes() + positions.astype("<i4").tobytes()
        header = self.image_format.header(num_entries, digest(digests + entries).hex())
        return _Computed(header, tail, entries)

    # The books

    def held_pages(self) -> IntArray:
        return self._pages[:0] if self.closed else self._pages

    def check(self) -> None:
        """Raise AssertionError if the pages can't hold what was there at open."""
        if not self.closed:
            self.pool.check_fill(self._pages, self.layout.num_entries)
