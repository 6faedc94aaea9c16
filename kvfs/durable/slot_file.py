"""Slot file: pages of one identity on disk, one page in each slot.

    offset                      bytes        content
    0                           4096         superblock: see `kvfs.durable.superblock`
    4096 + slot * slot_bytes    slot_bytes   a page, and zeros up to a multiple of 4096

Reads and writes bypass the page cache if the file system allows it (O_DIRECT). So a page is on its way to the disk when
its write returns, and fdatasync waits for no other file's bytes. A page that fills its slot, and is aligned to 4096
bytes in memory, is written and read in place, without a copy. Other pages go through a buffer. A job makes one system
call for each run of consecutive slots, wherever the pages are in memory. Each checksum is seeded with its slot's
number, so bytes that were written to a wrong slot count as damaged.

Several worker threads may use the file concurrently.
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
"""Slots that one job writes or reads: 11 MiB with the default model's pages."""
_GROWTH_BYTES = 16 << 20
"""The file grows by at least this many bytes, because the file system journals growth, but not writes inside the file.
"""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

Bytes: TypeAlias = bytes | memoryview

Source: TypeAlias = Callable[[], Bytes]
"""Function that a worker calls for a page's bytes. If the bytes change before the write is over, the slot is not used.
"""


class Damaged(Exception):  # noqa: N818 - as the errors of libsym
    """Error for slots that do not hold the bytes that were written there."""

    def __init__(self, slots: Sequence[int]) -> None:
        super().__init__(f"slots {list(slots)} are damaged")
        self.slots = tuple(slots)


def slot_bytes_of(page_bytes: int) -> int:
    return -(-page_bytes // ALIGNMENT) * ALIGNMENT


class SlotFile:
    """An open slot file."""

    def __init__(self, path: Path, page_bytes: int, *, read_only: bool = False) -> None:
        """Open an existing file. The caller has checked the file's superblock."""
        self.path = path
        self.page_bytes = page_bytes
        self.slot_bytes = slot_bytes_of(page_bytes)
        self._fd, self.is_direct = _open(path, os.O_RDONLY if read_only else os.O_RDWR)
        self._capacity = max(0, os.fstat(self._fd).st_size - SUPERBLOCK_BYTES) // self.slot_bytes
        self._growing = threading.Lock()
        self._buffers = _Buffers(SLOTS_A_JOB * self.slot_bytes)

    @property
    def num_slots(self) -> int:
        """Number of slots that the file has room for."""
        return self._capacity

    def close(self) -> None:
        os.close(self._fd)

    def write(self, slots: Sequence[int], pages: Sequence[Source]) -> npt.NDArray[np.uint64]:
        """Fill slots, and return their checksums. The slots are on disk after the next `sync`."""
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
        """Yield the pages in these slots, and the damaged slots. The pages are valid only inside the `with`."""
        assert len(slots) == len(checks) <= SLOTS_A_JOB
        with self._buffers.one() as buffer:
            rooms = self._rooms(buffer)[: len(slots)]
            self._fill(rooms, slots)
            yield [room[: self.page_bytes] for room in rooms], self._wrong(rooms, slots, checks)

    def verify(self, slots: Sequence[int], checks: Sequence[int]) -> list[int]:
        """Return the slots that are not as they were written."""
        with self.lent(slots, checks) as (_, damaged):
            return damaged

    def read_into(self, slots: Sequence[int], checks: Sequence[int], rooms: Sequence[memoryview]) -> None:
        """Fill the memory in `rooms` with pages. If slots are not as written, raise Damaged with these slots; then no
        page in `rooms` is valid.
        """
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
        """Wait until all writes are on disk."""
        os.fdatasync(self._fd)

    def give_back(self, slots: Sequence[int], end: Callable[[], int]) -> None:
        """Return the blocks of free slots to the file system, and cut the file after the last used slot. `end` returns
        the slot at which the file may end.

        A hole reads as zeros, so no bytes of the old page can be read later.
        """
        with self._growing:
            num_used = end()  # called under the lock, so that writes to slots taken later wait in `_grow`
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
            with self._buffers.one() as buffer:  # the file system has no holes, so zeros overwrite the old bytes
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
        """Whether the disk can read into or write from this memory directly, as a whole slot."""
        return self.slot_bytes == self.page_bytes and (not self.is_direct or _address(data) % ALIGNMENT == 0)

    def _as_slot(self, page: Bytes, room: memoryview) -> Bytes:
        """Return a page in the form that is written: the page itself, or a padded copy in the memory `room`."""
        if self._fits(page):
            return page
        _copy(room[: self.page_bytes], page)
        room[self.page_bytes :] = bytes(self.slot_bytes - self.page_bytes)
        return room

    def _wrong(self, rooms: Sequence[memoryview], slots: Sequence[int], checks: Sequence[int]) -> list[int]:
        """Return the slots whose bytes, as read into `rooms`, are not the bytes that were written."""
        found = zip(rooms, slots, checks, strict=True)
        return [slot for room, slot, check in found if self._checksum(room, slot) != check]

    @staticmethod
    def _checksum(room: Bytes, slot: int) -> int:
        return xxhash.xxh3_64_intdigest(room, seed=slot)

    # The disk

    def _write_all(self, views: Sequence[Bytes], offset: int) -> None:
        """Write buffers one after the other, from `offset` on."""
        while views:
            written = os.pwritev(self._fd, views, offset)
            if written % ALIGNMENT and self.is_direct:  # the disk became full within a block: write that block again
                written -= written % ALIGNMENT
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset += written
            views = _behind(views, written)

    def _fill(self, rooms: Sequence[memoryview], slots: Sequence[int]) -> None:
        """Read slots into the memory in `rooms`, without verifying them."""
        for first, stop in _runs(slots):
            self._read_run(rooms[first:stop], slots[first:stop])

    def _read_run(self, rooms: Sequence[memoryview], slots: Sequence[int]) -> None:
        """Read consecutive slots. If the disk can't read them together, read the slots one by one. A slot that the disk
        can't read counts as damaged.
        """
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
        """Read into the pieces of memory in `rooms`, one after the other. Bytes beyond the file's end become zeros,
        which fail the checksum.
        """
        while rooms:
            count = os.preadv(self._fd, rooms, offset)
            if not count:
                _clear(rooms)
                return
            offset += count
            rooms = [memoryview(room) for room in _behind(rooms, count)]


class _Buffers:
    """Reusable buffers, aligned for O_DIRECT. The number of buffers is the largest number of jobs that have run at the
    same time.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[memoryview] = []

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        try:
            buffer = self._free.pop()
        except IndexError:
            # Use huge pages. Small pages lie scattered in memory, so that the disk gets many pieces, and reads take 2.5
            # times as long.
            mapping = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # the kernel has no huge pages
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
    """Copy bytes, without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _clear(rooms: Sequence[memoryview]) -> None:
    for room in rooms:
        room[:] = bytes(len(room))


def _behind(views: Sequence[Bytes], count: int) -> list[Bytes]:
    """Return the buffers that are left after the first `count` bytes."""
    left = list(views)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = memoryview(left[0])[count:]
    return left


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each run of consecutive slots: the index in `slots` of the run's first slot, and the index after its last
    slot.
    """
    first = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            yield first, place
            first = place


def _open(path: Path, access: int) -> tuple[int, bool]:
    """Open a file. Return the descriptor, and whether it bypasses the page cache."""
    flags = access | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags), False
    try:  # some file systems open a file with O_DIRECT, but then refuse every read
        os.preadv(fd, [mmap.mmap(-1, ALIGNMENT)], 0)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags), False
    return fd, True


def disk_error(verb: str, path: Path, error: OSError) -> SymError:
    """Return a SymError for an error of the disk, with its errno."""
    return SymError(f"can't {verb} {path}: {error.strerror or error}", error.errno or errno.EIO)
