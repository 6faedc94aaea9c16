"""Buffers: memory for bytes that go between the kernel and a disk, used again and again.

The daemon has malloc give blocks of 128 KiB back at once, so that none stays after a crowd. Then a request of 1 MiB
takes fresh memory, and fresh memory costs a page fault for each 4 KiB: 0.24 ms for a read of 1 MiB whose copy takes
0.39, and 0.60 ms for a write whose copies take 0.16.

A buffer is mapped, and takes memory as it is filled: thousands of requests may wait for a disk, each with its buffer.
"""

from __future__ import annotations

import mmap

from kvfs.names.sums import EXTENT_BYTES

BUFFER_BYTES = (1 << 20) + EXTENT_BYTES
"""A request has 1 MiB at most; to verify them, a read takes whole extents."""
MOST_FREE = 4


class Buffers:
    """Buffers of one thread. A buffer that is not given back is freed like any other object."""

    __slots__ = ("_free", "_lent")

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lent: memoryview | None = None

    def take(self, num_bytes: int) -> memoryview:
        """Return room for so many bytes, with whatever lies there."""
        is_kept = self._free and num_bytes <= BUFFER_BYTES
        buffer = self._free.pop() if is_kept else mmap.mmap(-1, max(num_bytes, BUFFER_BYTES), mmap.MAP_PRIVATE)
        return memoryview(buffer)[:num_bytes]

    def give(self, room: memoryview) -> None:
        """Take back what nobody uses any more."""
        buffer = room.obj
        assert isinstance(buffer, mmap.mmap)
        if len(self._free) < MOST_FREE and len(buffer) == BUFFER_BYTES:
            self._free.append(buffer)

    def lend(self, room: memoryview) -> None:
        """Take back what the caller uses until its next await: the next room that is lent ends that."""
        if self._lent is not None:
            self.give(self._lent)
        self._lent = room
