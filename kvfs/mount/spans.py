"""Spans: reads of images whose pages are on disk. A reader reads one span of pages from the disk at a time, and reads
ahead the next span.

A program reads an image in pieces of at most 1 MiB, while a page has between 100 KiB and 10 MiB. If each piece were a
read of the disk, the same slot would be read many times. If the file were read into the arena, the read would evict
pages that are in use. So a reader keeps some spans in memory outside of the arena while it reads near them. The memory
of one span is called its *room*.

All readers of the mount share a few rooms. A reader that finds no free room takes the room of the least recently read
span that no reader is using. If readers are using every span, the reader waits. A read-ahead takes no room from another
span.

All code runs on the trio thread, except for the disk jobs that fill rooms.
"""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import trio

from kvfs.images.snapshot import Snapshot
from kvfs.mount.eager import Eager
from kvfs.pages.free_list import IntArray
from kvfs.volume.storage import Reading, Storage
from libsym.errors import SymError

SPAN_BYTES = 8 << 20
"""Size of a span. Reads of this size reach the disk's full rate."""
MAX_ROOMS = 12
"""The most rooms of all readers: 96 MiB, or more if a page is larger than a span."""
ROOMS_KEPT = 3
"""Unused rooms that are kept. A read into memory that was used before reaches the disk's full rate; a read into new
memory reaches a third of that rate.
"""


@dataclass(slots=True, eq=False)
class Span:
    """Pages of one file that were read into one buffer, `room`."""

    owner: Spans
    number: int
    room: memoryview
    pages: dict[int, memoryview]
    """The pages that were not in memory when the read began, by index in the file."""
    reading: Reading
    num_waiting: int = 0
    """Number of readers that wait for the span or use it."""

    @property
    def is_free(self) -> bool:
        """Whether another span may take the room."""
        return not self.num_waiting and self.reading.is_over


class Rooms:
    """The memory of all spans of one mount."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._spans: dict[Span, None] = {}  # spans with a room, the least recently used first
        self._waiting = trio.lowlevel.ParkingLot()

    def take(self, num_bytes: int, *, is_ahead: bool) -> memoryview | None:
        """Return a room, or None if no room is free and none may be taken from a span."""
        if not self._free and len(self._spans) >= MAX_ROOMS:
            oldest = None if is_ahead else next((each for each in self._spans if each.is_free), None)
            if oldest is None:
                return None
            oldest.owner.forget(oldest)
        room = self._free.pop() if self._free else memoryview(b"")
        return room if len(room) >= num_bytes else _new_room(num_bytes)

    def used(self, span: Span) -> None:
        """Note that a span was begun or read just now. Other spans lose their rooms before this span does."""
        self._spans.pop(span, None)
        self._spans[span] = None
        self.wake()

    def give(self, span: Span) -> None:
        """Take a span's room back. A room that the disk still writes to is not reused."""
        del self._spans[span]
        if span.is_free and len(self._free) < ROOMS_KEPT:
            self._free.append(span.room)
        self.wake()

    async def wait(self) -> None:
        """Wait until a room may be free."""
        await self._waiting.park()

    def wake(self) -> None:
        """Wake the readers that wait for a room. Each reader tries again."""
        self._waiting.unpark_all()


class Spans:
    """The spans of one reader."""

    __slots__ = (
        "_eager",
        "_last",
        "_num_pages",
        "_page_bytes",
        "_rooms",
        "_snapshot",
        "_spans",
        "_step",
        "_storage",
    )

    def __init__(self, snapshot: Snapshot, storage: Storage, rooms: Rooms, eager: Eager) -> None:
        self._snapshot = snapshot
        self._storage = storage
        self._rooms = rooms
        self._eager = eager
        self._page_bytes = snapshot.image_format.page_bytes
        self._num_pages = max(1, SPAN_BYTES // self._page_bytes)
        """Number of pages in a span."""
        self._step = -(-self._page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # distance of pages, aligned for O_DIRECT
        self._spans: dict[int, Span] = {}
        self._last = -1
        """Number of the span that was read last."""

    async def read(self, missing: Sequence[int]) -> dict[int, memoryview]:
        """Return the first of the `missing` pages, and the other `missing` pages in the same span. The pages are valid
        until the next await.
        """
        async with self.lent(missing) as pages:
            return pages

    @asynccontextmanager
    async def lent(self, missing: Sequence[int]) -> AsyncIterator[dict[int, memoryview]]:
        """Yield the pages that `read` returns. These pages are valid inside the `with`, even across an await."""
        span = await self._have(missing[0])
        self._read_ahead(span.number)
        span.num_waiting += 1
        try:
            if not span.reading.is_over:
                await self._eager.leave()
            await span.reading.wait()
            yield {number: span.pages[number] for number in missing if number in span.pages}
        except SymError:
            self.forget(span)
            raise
        finally:
            span.num_waiting -= 1
            self._rooms.wake()

    def forget(self, span: Span) -> None:
        """Drop a span, so that no new read uses it. Reads that already wait for the span still get their pages."""
        if self._spans.get(span.number) is span:
            del self._spans[span.number]
            self._rooms.give(span)

    def close(self) -> None:
        """Drop all spans."""
        for span in tuple(self._spans.values()):
            self.forget(span)

    async def _have(self, page: int) -> Span:
        """Return the span with this page. Begin the span's read if necessary."""
        number = page // self._num_pages
        while True:
            span = self._spans.get(number)
            if span is not None and page in span.pages:
                self._rooms.used(span)
                return span
            room = self._rooms.take(self._num_pages * self._step, is_ahead=False)
            if room is not None:
                break
            await self._eager.leave()
            await self._rooms.wait()
        if span is not None:  # the page was in memory when the old span was begun
            self.forget(span)
        return self._begin(number, room)

    def _begin(self, number: int, room: memoryview) -> Span:
        numbers, pages = self._cold(number)
        step, size = self._step, self._page_bytes
        rooms = {each: room[place * step : place * step + size] for place, each in enumerate(numbers)}
        reading = self._storage.read_cold(pages, list(rooms.values()), self._rooms.wake)
        span = self._spans[number] = Span(self, number, room, rooms, reading)
        self._rooms.used(span)
        return span

    def _cold(self, number: int) -> tuple[list[int], IntArray]:
        return self._snapshot.cold_pages(number * self._num_pages, (number + 1) * self._num_pages)

    def _read_ahead(self, number: int) -> None:
        """Begin to read the next span for a sequential reader. The span before the current one is kept, because the
        kernel's read-ahead asks for pieces in any order.
        """
        is_in_order = 0 <= number - self._last <= 1
        self._last = number
        for each in tuple(self._spans.values()):
            if abs(each.number - number) > 1 and not each.num_waiting:
                self.forget(each)
        if is_in_order and number + 1 not in self._spans and self._cold(number + 1)[0]:
            room = self._rooms.take(self._num_pages * self._step, is_ahead=True)
            if room is not None:
                self._begin(number + 1, room)


def _new_room(num_bytes: int) -> memoryview:
    """Return a room of huge pages if the kernel has some, because a read into huge pages has fewer pieces."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)
