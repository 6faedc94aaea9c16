"""The disk under plain files: the system calls that backing files need, and the deadline for them.

Any of these calls may hang for as long as the disk hangs. So the owner's thread makes only calls that never block in
the kernel (`RWF_NOWAIT`). The first such call shows whether the file system supports non-blocking calls.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DISK_DEADLINE_S = 30.0
"""A request that has waited this long for the disk gets ETIMEDOUT. A disk needs less time to spin up, or to give up on
a bad sector. People suspect a fault of the daemon only after a longer wait.
"""

NOT_OFFERED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of a file system that lacks a non-blocking call. Many lack non-blocking buffered writes, and tmpfs also lacks
non-blocking reads.
"""


@dataclass(slots=True)
class Nowait:
    """Whether the file system supports non-blocking reads and writes. True until a call shows that it does not."""

    reads: bool = True
    writes: bool = True


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _size(fd: int) -> int:
    return os.fstat(fd).st_size


@dataclass(slots=True)
class Disk:
    """The system calls on a file system. Tests replace some of them by calls that fail or wait, and may change the
    deadline.
    """

    deadline_s: float = DISK_DEADLINE_S
    nowait: Nowait = field(default_factory=Nowait)
    open: Callable[[Path, int], int] = _open
    close: Callable[[int], None] = os.close
    size: Callable[[int], int] = _size
    pread: Callable[[int, list[memoryview], int], int] = os.preadv
    preadv: Callable[[int, list[bytearray | memoryview], int, int], int] = os.preadv
    pwritev: Callable[[int, list[bytes | memoryview], int, int], int] = os.pwritev
    ftruncate: Callable[[int, int], None] = os.ftruncate
    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    fdatasync: Callable[[int], None] = os.fdatasync
    unlink: Callable[[Path], None] = os.unlink
