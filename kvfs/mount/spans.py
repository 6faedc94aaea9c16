"""Reads images of files that are on disk: a span of pages at a time, the next one ahead, into no frame.

A program reads an image by pieces of 1 MiB at most, and a page may have 10 MiB or 100 KiB. To read its slot for each
piece would read it many times. To bring the file into memory would put others out that are used. So a reader has some
spans in rooms of their own, outside of the arena, for as long as they are near to where it reads.

There are few rooms for all readers together. One that finds none takes that of the span that was read from the
longest ago, and waits only if somebody waits for each of them. A read-ahead takes no room from anybody.

All on the trio thread, but for the jobs of the disk that fill rooms.
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
from kvfs.storage import Reading, Storage
from libsym.errors import SymError

SPAN_BYTES = 8 << 20
"""A read of this size has the disk's full rate; two of them are under way while one is given out."""
MAX_ROOMS = 12
"""96 MiB, or as many pages where a page is larger."""
ROOMS_KEPT = 3
"""Of rooms that nobody uses: memory that is there already is filled at the disk's rate, new memory at a third of it."""


@dataclass(slots=True, eq=False)
class Span:
    """Pages of one file in a room."""

    owner: Spans
    number: int
    room: memoryview
    pages: dict[int, memoryview]
    """By their number in the file: those that were not in memory when it was begun."""
    reading: Reading
    num_waiting: int = 0
    """Those who want to read from it."""

    @property
    def is_free(self) -> bool:
        """Whether its room may be taken."""
        return not self.num_waiting and self.reading.is_over


class Rooms:
    """The memory of all spans of one mount."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._spans: dict[Span, None] = {}  # which have a room: that which was read from last is the last
        self._waiting = trio.lowlevel.ParkingLot()

    def take(self, num_bytes: int, *, is_ahead: bool) -> memoryview | None:
        """A room, or None: not now."""
        if not self._free and len(self._spans) >= MAX_ROOMS:
            oldest = None if is_ahead else next((each for each in self._spans if each.is_free), None)
            if oldest is None:
                return None
            oldest.owner.forget(oldest)
        room = self._free.pop() if self._free else memoryview(b"")
        return room if len(room) >= num_bytes else _new_room(num_bytes)

    def used(self, span: Span) -> None:
        """It has its room, or was read from just now."""
        self._spans.pop(span, None)
        self._spans[span] = None
        self.wake()

    def give(self, span: Span) -> None:
        """It needs its room no more. One that is still being written to is nobody's any more."""
        del self._spans[span]
        if span.is_free and len(self._free) < ROOMS_KEPT:
            self._free.append(span.room)
        self.wake()

    async def wait(self) -> None:
        """Until there may be one again."""
        await self._waiting.park()

    def wake(self) -> None:
        """Something has changed for those who wait."""
        self._waiting.unpark_all()


class Spans:
    """Those of one reader."""

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
        """Of a span."""
        self._step = -(-self._page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # from page to page: the disk wants it so
        self._spans: dict[int, Span] = {}
        self._last = -1
        """The span that was read from last."""

    async def read(self, missing: Sequence[int]) -> dict[int, memoryview]:
        """Some of these pages of the file, the first one among them: good until the next await."""
        async with self.lent(missing) as pages:
            return pages

    @asynccontextmanager
    async def lent(self, missing: Sequence[int]) -> AsyncIterator[dict[int, memoryview]]:
        """The same: good inside the `with`, whatever is awaited there."""
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
        """It is not to be read from again; those who wait for it get what they wanted."""
        if self._spans.get(span.number) is span:
            del self._spans[span.number]
            self._rooms.give(span)

    def close(self) -> None:
        """Nobody reads any more."""
        for span in tuple(self._spans.values()):
            self.forget(span)

    async def _have(self, page: int) -> Span:
        """The span with this page, begun."""
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
        if span is not None:  # the page was in memory when that was begun
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
        """Who reads one span after the other finds the next one there. The one before stays: the kernel reads ahead,
        too, in any order.
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
    """Of huge pages, as far as there are: the disk gets fewer pieces."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)
