"""A reader's view of a KV file: the image as it was at open, whatever happens to the file afterwards.

A snapshot holds a reference on each page, so that no page is freed, and no entry before the snapshot's end is
rewritten. Bytes past that end, where another table may be appending, are masked. Opening copies only page numbers.

A reference does not keep a page in memory. On the thread that owns the pool, `read` returns full pages as views into
the store: no page can lose its frame before the next await, and by then the reply is written. Pages that are on disk
alone have to be read first, to other memory (`missing` says which), and are lent to `read`. Workers read optimistically
(`kvfs.pages.looking`). No reader loads a page into a frame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvfs.images.format import ImageFormat
from kvfs.pages.digest import NUM_LANES, digest, digests
from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.looking import Bytes, look
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.abi import PAGE_ENTRIES

NONE_LENT: Mapping[int, Bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Computed:
    """The parts of an image that are not full pages."""

    header: bytes
    tail: bytes
    """The last page with zeros past the end. Empty if the last page is full."""
    entries: bytes
    """The bytes of the tokens, then those of the positions."""


class Snapshot:
    """The image of a table's committed entries. The thread that owns the pool makes and closes the snapshot.

    Several worker threads may call `prepare` and `copy` concurrently. These calls, and all use of views from `read`,
    must end before `close`.
    """

    __slots__ = (
        "_computed",
        "_lock",
        "_num_full",
        "_pages",
        "closed",
        "image_format",
        "layout",
        "owner",
        "pool",
        "turns",
    )

    def __init__(self, table: PageTable, image_format: ImageFormat, turns: bytes = b"") -> None:
        assert not table.closed
        self.turns = turns
        """Where the turns of the file's conversation begin."""
        self.pool: PagePool = table.pool
        self.owner = table.owner
        """The account that is charged: the account of the file's owner at open, even if the file changes its owner
        later.
        """
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

    def missing(self, offset: int, size: int, lent: Collection[int] = ()) -> list[int]:
        """Return the full pages that these bytes need, each as an index into the file's pages. Pages in memory, and
        lent pages, are left out.
        """
        page_bytes, begin = self.image_format.page_bytes, offset - self.layout.pages
        first, stop = max(begin // page_bytes, 0), max(-(-(begin + size) // page_bytes), 0)
        return [number for number in self.cold_pages(first, stop)[0] if number not in lent]

    def cold_pages(self, first: int, stop: int) -> tuple[list[int], IntArray]:
        """Return the full pages from `first` to `stop - 1` that are on disk alone. The first result has the pages'
        indexes in the file, the second has the page numbers.
        """
        pages = self._pages[first : min(stop, self._num_full)]
        is_cold = self.pool.store.of[pages] == NOWHERE
        return (np.flatnonzero(is_cold) + first).tolist(), pages[is_cold]

    def unhashed(self) -> list[int]:
        """Return the indexes of the file's full pages that are on disk alone and have no digest."""
        numbers, pages = self.cold_pages(0, self._num_full)
        return [number for number, has in zip(numbers, self.pool.has_digest[pages].tolist(), strict=True) if not has]

    def hash(self, pages: Mapping[int, Bytes], checkpoint: Callable[[], None] = lambda: None) -> None:
        """Store the digests of pages that were read. For a worker thread."""
        numbers = list(pages)
        for first in range(0, len(numbers), NUM_LANES):
            checkpoint()
            group = numbers[first : first + NUM_LANES]
            values = digests([pages[number] for number in group])
            self.pool.keep_digests(
                self._pages[group], np.frombuffer(b"".join(values), np.uint8).reshape(len(group), -1)
            )

    def prepare(self, checkpoint: Callable[[], None] = lambda: None) -> None:
        """Compute the digests and the header, once. This takes a second for each GB of pages without a digest.

        Call `prepare` from a worker thread before reads that must be quick. Otherwise the first `read` does this work.
        `checkpoint` is called at every page, and may raise to end the work.
        """
        self._compute(checkpoint)

    def read(self, offset: int, size: int, lent: Mapping[int, Bytes] = NONE_LENT) -> Bytes:
        """Return up to `size` bytes of the image; empty past its end. Only the thread that owns the pool calls this.

        A range in consecutive memory is returned without a copy, as a view into the store or into lent bytes. Use the
        result before the next await. `lent` has the pages that `missing` returned.
        """
        assert not self.closed
        assert min(offset, size) >= 0
        parts = list(self._parts(offset, min(offset + size, self.size), lent))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Release the pages."""
        assert not self.closed
        assert not self._lock.locked(), "closed while a worker was preparing it"
        self.closed = True
        self.pool.release(self._pages, self.owner)

    # Reading

    def _parts(self, begin: int, end: int, lent: Mapping[int, Bytes]) -> Iterator[Bytes]:
        """Yield the bytes from `begin` to `end`, in the largest pieces that are consecutive in memory."""
        computed = self._compute()
        pages_at, tokens_at = self.layout.pages, self.layout.tokens
        tail_at = pages_at + self._num_full * self.image_format.page_bytes
        if begin < min(end, pages_at):
            yield computed.header[begin:end]
        if max(begin, pages_at) < min(end, tail_at):
            yield from self._views(max(begin, pages_at) - pages_at, min(end, tail_at) - pages_at, lent)
        if max(begin, tail_at) < min(end, tokens_at):
            yield memoryview(computed.tail)[max(begin - tail_at, 0) : end - tail_at]
        if max(begin, tokens_at) < end:
            yield memoryview(computed.entries)[max(begin - tokens_at, 0) : end - tokens_at]

    def _views(self, begin: int, end: int, lent: Mapping[int, Bytes]) -> Iterator[Bytes]:
        """Yield bytes of full pages, with offsets from the first page. Pages in consecutive frames form one view."""
        page_bytes, store = self.image_format.page_bytes, self.pool.store
        first, stop = begin // page_bytes, -(-end // page_bytes)
        frames = store.of[self._pages[first:stop]]
        is_lent = np.array([number in lent for number in range(first, stop)])
        cuts = (np.flatnonzero((np.diff(frames) != 1) | is_lent[:-1] | is_lent[1:]) + 1).tolist()
        for run_first, run_stop in zip([0, *cuts], [*cuts, len(frames)], strict=True):
            if is_lent[run_first]:
                view: Bytes = memoryview(lent[first + run_first])
            else:
                view = store.view(int(self._pages[first + run_first]), run_stop - run_first)
            run_begin = (first + run_first) * page_bytes
            yield view[max(begin - run_begin, 0) : end - run_begin]

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
            tail = self._head_of_last(tail_entries)
            digests += digest(tail)
        tokens = self.pool.tokens[self._pages].reshape(-1)[:num_entries]
        positions = self.pool.positions[self._pages].reshape(-1)[:num_entries]
        entries = tokens.astype("<i4").tobytes() + positions.astype("<i4").tobytes()
        header = self.image_format.header(num_entries, digest(digests + entries).hex(), self.turns)
        return _Computed(header, tail, entries)

    def _head_of_last(self, num_entries: int) -> bytes:
        """Return the bytes of the last page, with zeros behind its first `num_entries` entries."""
        pool, last = self.pool, self._pages[-1:]
        heads = look(
            pool.store,
            pool.cold,
            last,
            lambda views: [pool.cold.head(int(last[0]), view, num_entries) for view in views],
        )
        return heads[0]

    # The audit

    def held_pages(self) -> IntArray:
        return self._pages[:0] if self.closed else self._pages

    def held(self) -> tuple[IntArray, int]:
        """Return the pages and the number of their entries, from which a fork of this view can be made."""
        return self.held_pages(), self.layout.num_entries

    def check(self) -> None:
        """Raise AssertionError if the pages can't hold the entries that the file had at open."""
        if not self.closed:
            self.pool.check_fill(self._pages, self.layout.num_entries)
