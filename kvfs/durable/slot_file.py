"""A file of slots: pages of one identity on disk, a page in each slot.

    offset                      bytes        what
    0                           4096         superblock: see `kvfs.durable.superblock`
    4096 + slot * slot_bytes    slot_bytes   a page, and zeros up to a multiple of 4096

The page cache is bypassed where the file system allows it (O_DIRECT). So a page is on its way to the disk when its
write returns, and fdatasync waits for no other file's bytes. A page that fills its slot, and lies at a multiple of 4096
in memory, is written from where it is and read to where it belongs: the disk's own copy is the only one. Others go
through a buffer. A job is one system call for each run of slots, wherever the pages are. A checksum is seeded with the
number of its slot: bytes that went to another slot than they were meant for are as wrong as damaged ones.

For worker threads, several at once.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from libsym.errors import SymError

ALIGNMENT = 4096
SUPERBLOCK_BYTES = 4096
SLOTS_A_JOB = 16
"""Written or read by one job: 11 MiB of the default model's pages."""
_GROWTH_BYTES = 16 << 20
"""The file grows by so much at a time: growing is journalled by the file system, writing into it is not."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

Bytes: TypeAlias = bytes | memoryview

Source: TypeAlias = Callable[[], Bytes]
"""Gives the bytes of a page; a worker asks. They stay as they are until the write is over, or the slot is not used."""


class Damaged(Exception):  # noqa: N818 - as the errors of libsym
    """What some slots hold is not what was written there."""

    def __init__(self, slots: Sequence[int]) -> None:
        super().__init__(f"slots {list(slots)} are damaged")
        self.slots = tuple(slots)


def slot_bytes_of(page_bytes: int) -> int:
    return -(-page_bytes // ALIGNMENT) * ALIGNMENT


class SlotFile:
    """One open file of slots."""

    def __init__(self, path: Path, page_bytes: int, *, read_only: bool = False) -> None:
        """The file exists, and its superblock was looked at."""
        self.path = path
        self.page_bytes = page_bytes
        self.slot_bytes = slot_bytes_of(page_bytes)
        self._fd, self.is_direct = _open(path, os.O_RDONLY if read_only else os.O_RDWR)
        self._capacity = max(0, os.fstat(self._fd).st_size - SUPERBLOCK_BYTES) // self.slot_bytes
        self._growing = threading.Lock()
        self._buffers = _Buffers(SLOTS_A_JOB * self.slot_bytes)

    @property
    def num_slots(self) -> int:
        """As long as the file is."""
        return self._capacity

    def close(self) -> None:
        os.close(self._fd)

    def write(self, slots: Sequence[int], pages: Sequence[Source]) -> npt.NDArray[np.uint64]:
        """Fill slots, and give their checksums. They are on disk after the next `sync`."""
        assert len(slots) == len(pages) <= SLOTS_A_JOB
        self._grow(max(slots) + 1)
        checks = np.empty(len(slots), np.uint64)
        with self._buffers.one() as buffer:
            views = [self._as_slot(page(), room) for page, room in zip(pages, self._rooms(buffer), strict=False)]
            for place, (slot, view) in enumerate(zip(slots, views, strict=True)):
                checks[place] = self._checksum(view, slot)
            for first, stop in _runs(slots):
                self._write_all(views[first:stop], self._offset(slots[first]))
        return checks

    @contextmanager
    def lent(self, slots: Sequence[int], checks: Sequence[int]) -> Iterator[tuple[list[memoryview], list[int]]]:
        """The pages, good inside the `with`; and which of the slots are not as they were written."""
        assert len(slots) == len(checks) <= SLOTS_A_JOB
        with self._buffers.one() as buffer:
            rooms = self._rooms(buffer)[: len(slots)]
            self._fill(rooms, slots)
            yield [room[: self.page_bytes] for room in rooms], self._wrong(rooms, slots, checks)

    def verify(self, slots: Sequence[int], checks: Sequence[int]) -> list[int]:
        """The slots that are not as they were written."""
        with self.lent(slots, checks) as (_, damaged):
            return damaged

    def read_into(self, slots: Sequence[int], checks: Sequence[int], rooms: Sequence[memoryview]) -> None:
        """Fill rooms with pages; Damaged names the slots that are not as they were written. Then believe none."""
        if all(self._fits(room) for room in rooms):
            assert len(slots) == len(checks) == len(rooms) <= SLOTS_A_JOB
            self._fill(rooms, slots)
            damaged = self._wrong(rooms, slots, checks)
        else:
            with self.lent(slots, checks) as (views, damaged):
                if not damaged:
                    for room, view in zip(rooms, views, strict=True):
                        _copy(room, view)
        if damaged:
            raise Damaged(damaged)

    def sync(self) -> None:
        """What was written is on disk when this returns."""
        os.fdatasync(self._fd)

    def give_back(self, slots: Sequence[int], end: Callable[[], int]) -> None:
        """The file system may have the blocks of these slots again, and all from slot `end()` on: behind the last one
        that is not free.

        A hole reads as zeros: nothing of what was there can be read by whatever gets the slot next.
        """
        with self._growing:
            num_used = end()  # now: no write of a slot that was taken since gets past `_grow` before the file is cut
            if num_used * self.slot_bytes + 4 * _GROWTH_BYTES < self._capacity * self.slot_bytes:
                os.ftruncate(self._fd, self._offset(num_used))
                self._capacity = num_used
        for first, stop in _runs(slots):
            if slots[first] < self._capacity:
                self._punch(slots[first], stop - first)

    def _punch(self, slot: int, count: int) -> None:
        offset, size = self._offset(slot), count * self.slot_bytes
        if _libc.fallocate(self._fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
            code = ctypes.get_errno()
            if code not in _NO_FALLOCATE:
                raise OSError(code, os.strerror(code))
            with self._buffers.one() as buffer:  # no holes there: overwritten, so that nobody reads it
                room = buffer[: self.slot_bytes]
                room[:] = bytes(self.slot_bytes)
                for each in range(slot, slot + count):
                    self._write_all([room], self._offset(each))

    def _grow(self, num_slots: int) -> None:
        with self._growing:
            if num_slots <= self._capacity:
                return
            wanted = num_slots + _GROWTH_BYTES // self.slot_bytes
            for capacity in (wanted, num_slots):
                size = (capacity - self._capacity) * self.slot_bytes
                if not _libc.fallocate(self._fd, 0, self._offset(self._capacity), size):
                    self._capacity = capacity
                    return
                code = ctypes.get_errno()
                if code in _NO_FALLOCATE:
                    os.ftruncate(self._fd, self._offset(num_slots))
                    self._capacity = num_slots
                    return
            raise OSError(code, os.strerror(code))

    def _offset(self, slot: int) -> int:
        return SUPERBLOCK_BYTES + slot * self.slot_bytes

    # Pages in memory

    def _rooms(self, buffer: memoryview) -> list[memoryview]:
        return [buffer[first : first + self.slot_bytes] for first in range(0, len(buffer), self.slot_bytes)]

    def _fits(self, data: Bytes) -> bool:
        """Whether the disk can take a page from there, or put it there, as a slot."""
        return self.slot_bytes == self.page_bytes and (not self.is_direct or _address(data) % ALIGNMENT == 0)

    def _as_slot(self, page: Bytes, room: memoryview) -> Bytes:
        """A page as it is written: where it lies, or in this room."""
        if self._fits(page):
            return page
        _copy(room[: self.page_bytes], page)
        room[self.page_bytes :] = bytes(self.slot_bytes - self.page_bytes)
        return room

    def _wrong(self, rooms: Sequence[memoryview], slots: Sequence[int], checks: Sequence[int]) -> list[int]:
        """The slots of which these rooms hold something else than was written."""
        found = zip(rooms, slots, checks, strict=True)
        return [slot for room, slot, check in found if self._checksum(room, slot) != check]

    @staticmethod
    def _checksum(room: Bytes, slot: int) -> int:
        return xxhash.xxh3_64_intdigest(room, seed=slot)

    # The disk

    def _write_all(self, views: Sequence[Bytes], offset: int) -> None:
        """One behind the other."""
        while views:
            written = os.pwritev(self._fd, views, offset)
            if written % ALIGNMENT and self.is_direct:  # a disk that is full in the middle of a block: once more
                written -= written % ALIGNMENT
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset += written
            views = _behind(views, written)

    def _fill(self, rooms: Sequence[memoryview], slots: Sequence[int]) -> None:
        """Read slots as they are."""
        for first, stop in _runs(slots):
            self._read_run(rooms[first:stop], slots[first:stop])

    def _read_run(self, rooms: Sequence[memoryview], slots: Sequence[int]) -> None:
        """Slots that follow each other. One that the disk can't read is as good as damaged: the others are read."""
        try:
            self._read_all(rooms, self._offset(slots[0]))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            if len(slots) > 1:
                for room, slot in zip(rooms, slots, strict=True):
                    self._read_run([room], [slot])
                return
            log.error("can't read slot %d of %s: %s", slots[0], self.path, error.strerror)  # noqa: TRY400
            _clear(rooms)

    def _read_all(self, rooms: Sequence[memoryview], offset: int) -> None:
        """Bytes beyond the end of the file read as zeros: the checksum will tell."""
        while rooms:
            count = os.preadv(self._fd, rooms, offset)
            if not count:
                _clear(rooms)
                return
            offset += count
            rooms = [memoryview(room) for room in _behind(rooms, count)]


class _Buffers:
    """Room to write from and read into, aligned as O_DIRECT needs it; as many as there are jobs at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[memoryview] = []

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        try:
            buffer = self._free.pop()
        except IndexError:
            # Of huge pages: of small ones, which lie anywhere, the disk gets many pieces; reads take 2.5 times as long.
            mapping = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel that has none
                mapping.madvise(mmap.MADV_HUGEPAGE)
            buffer = memoryview(mapping)
        try:
            yield buffer
        finally:
            self._free.append(buffer)


def _address(data: Bytes) -> int:
    found: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return found


def _copy(target: memoryview, source: Bytes) -> None:
    """Lets go of the interpreter's lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _clear(rooms: Sequence[memoryview]) -> None:
    for room in rooms:
        room[:] = bytes(len(room))


def _behind(views: Sequence[Bytes], count: int) -> list[Bytes]:
    """What is left of them behind so many bytes."""
    left = list(views)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = memoryview(left[0])[count:]
    return left


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Places of slots that follow each other: first, and the one after the last."""
    first = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            yield first, place
            first = place


def _open(path: Path, access: int) -> tuple[int, bool]:
    """The descriptor, and whether it bypasses the page cache."""
    flags = access | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags), False
    try:  # some file systems open it so, and refuse every read
        os.preadv(fd, [mmap.mmap(-1, ALIGNMENT)], 0)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags), False
    return fd, True


def disk_error(verb: str, path: Path, error: OSError) -> SymError:
    """What a caller is told of an error of the disk."""
    return SymError(f"can't {verb} {path}: {error.strerror or error}", error.errno or errno.EIO)
