"""The disk below plain files: the system calls that backing files take, and how long to wait for them.

Any of them may hang, for as long as the disk does: so the owner's thread makes none but those that the kernel promises
not to wait in (`RWF_NOWAIT`). Whether it can promise that depends on the file system, and is found out by asking.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DISK_DEADLINE_S = 30.0
"""A request that has waited so long for the disk gets ETIMEDOUT: longer than a disk takes to spin up, or to give up on
a bad sector; shorter than what people wait for before they look for a defect of ours."""

NOT_OFFERED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of a file system that can't promise not to wait: many for buffered writes, tmpfs for reads, too."""


@dataclass(slots=True)
class Nowait:
    """Calls that the file system can make without waiting, as far as is known."""

    reads: bool = True
    writes: bool = True


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _size(fd: int) -> int:
    return os.fstat(fd).st_size


@dataclass(slots=True)
class Disk:
    """A file system, and its calls. Tests replace some calls by ones that fail, or wait. The deadline may change."""

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
