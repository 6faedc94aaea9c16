"""Buffers: reusable memory for bytes on the way between the kernel and a disk.

The daemon's malloc gives freed blocks of 128 KiB and more back to the system at once, so that a burst of requests
leaves no memory behind. So without buffers each request of 1 MiB would take fresh memory, with a page fault for each 4
KiB. These faults take 0.24 ms for a read whose copy takes 0.39 ms, and 0.60 ms for a write whose copies take 0.16 ms.

A buffer is a mapping, which takes memory only as it is filled. So thousands of requests may wait for a disk, each with
a buffer.
"""

from __future__ import annotations

import mmap

from kvfs.names.sums import EXTENT_BYTES

BUFFER_BYTES = (1 << 20) + EXTENT_BYTES
"""Size of a buffer. A request moves at most 1 MiB, but a read may need one more extent to verify its bytes."""
MOST_FREE = 4


class Buffers:
    """Buffers of one thread. A buffer that is not returned is freed like any other object."""

    __slots__ = ("_free", "_lent")

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lent: memoryview | None = None

    def take(self, num_bytes: int) -> memoryview:
        """Return a buffer for `num_bytes` bytes. Its content is arbitrary."""
        is_kept = self._free and num_bytes <= BUFFER_BYTES
        buffer = self._free.pop() if is_kept else mmap.mmap(-1, max(num_bytes, BUFFER_BYTES), mmap.MAP_PRIVATE)
        return memoryview(buffer)[:num_bytes]

    def give(self, room: memoryview) -> None:
        """Take back a buffer whose users are done with it."""
        buffer = room.obj
        assert isinstance(buffer, mmap.mmap)
        if len(self._free) < MOST_FREE and len(buffer) == BUFFER_BYTES:
            self._free.append(buffer)

    def lend(self, room: memoryview) -> None:
        """Take back a buffer, but let the caller use it until its next await. The next call of `lend` makes the buffer
        free.
        """
        if self._lent is not None:
            self.give(self._lent)
        self._lent = room
