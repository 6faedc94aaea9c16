"""The disk under plain files: the system calls that backing files need, and the deadline for them.

Any of these calls may hang for as long as the disk hangs. So the owner's thread makes only calls that never block in
the kernel (`RWF_NOWAIT`, `RESOLVE_CACHED`). The first such call shows whether the system supports it.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvfs._pages import ffi, lib

DISK_DEADLINE_S = 30.0
"""A request that has waited this long for the disk gets ETIMEDOUT. A disk needs less time to spin up, or to give up on
a bad sector. People suspect a fault of the daemon only after a longer wait.
"""

NOT_OFFERED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of a file system that lacks a non-blocking call. Many lack non-blocking buffered writes, and tmpfs also lacks
non-blocking reads.
"""

OPENS_NOT_OFFERED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM})
"""Errors of kernels before 5.12, and of sandboxes, which lack non-blocking opens."""

BLOCK_BYTES = 4096

_OPENAT2 = 437
"""The number of openat2(2), the same for all processors."""
_AT_FDCWD = -100
_RESOLVE_CACHED = 0x20
_SYNC_FILE_RANGE_WRITE = 2
_HOW = struct.pack("=QQQ", os.O_RDWR | os.O_CLOEXEC, 0, _RESOLVE_CACHED)
"""The struct open_how: flags, mode, and how to resolve the path."""


@dataclass(slots=True)
class Nowait:
    """Whether the system supports non-blocking calls. True until a call shows that it does not."""

    is_local: bool = False
    """Whether a non-blocking read has succeeded. Other file systems ask a server at each open, even if the kernel has
    the name in memory.
    """
    opens: bool = True
    reads: bool = True
    writes: bool = True


class Unwritten:
    """The memory for bytes of plain files that have no backing file yet. Any thread may use it."""

    __slots__ = ("_lock", "most_bytes", "num_bytes")

    def __init__(self) -> None:
        self.most_bytes = 0
        """Limit of `num_bytes`. The storage that will write the bytes sets it. Without a storage nothing is held."""
        self.num_bytes = 0
        """Bytes that the files will take on disk, in whole blocks."""
        self._lock = threading.Lock()

    @property
    def are_many(self) -> bool:
        """Whether the bytes should be written soon, because half of the memory for them is used."""
        return self.num_bytes > self.most_bytes // 2

    def takes(self, before: int, after: int) -> bool:
        """Whether a file may grow from `before` to `after` bytes. If so, it is charged for them."""
        growth = _in_blocks(after) - _in_blocks(before)
        with self._lock:
            if growth > 0 and self.num_bytes + growth > self.most_bytes:
                return False
            self.num_bytes += growth
            return True


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _open_nowait(path: Path) -> int:
    """Open a file to read and write, if the kernel has its name and its inode in memory. EAGAIN: it has not."""
    number: int = lib.syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), ffi.from_buffer(_HOW), len(_HOW))
    if number < 0:
        raise OSError(ffi.errno, os.strerror(ffi.errno))
    return number


def _begin_writing(fd: int) -> None:
    """Begin to write the bytes in memory to the disk, so that the syncs of several files share their work."""
    if lib.sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE) < 0:
        raise OSError(ffi.errno, os.strerror(ffi.errno))


def _size(fd: int) -> int:
    return os.fstat(fd).st_size


@dataclass(slots=True)
class Disk:
    """The system calls on a file system. Tests replace some of them by calls that fail or wait, and may change the
    deadline.
    """

    deadline_s: float = DISK_DEADLINE_S
    nowait: Nowait = field(default_factory=Nowait)
    unwritten: Unwritten = field(default_factory=Unwritten)
    open_nowait: Callable[[Path], int] = _open_nowait
    open: Callable[[Path, int], int] = _open
    close: Callable[[int], None] = os.close
    size: Callable[[int], int] = _size
    pread: Callable[[int, list[memoryview], int], int] = os.preadv
    preadv: Callable[[int, list[bytearray | memoryview], int, int], int] = os.preadv
    pwritev: Callable[[int, list[bytes | memoryview], int, int], int] = os.pwritev
    ftruncate: Callable[[int, int], None] = os.ftruncate
    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    fdatasync: Callable[[int], None] = os.fdatasync
    begin_writing: Callable[[int], None] = _begin_writing
    unlink: Callable[[Path], None] = os.unlink
