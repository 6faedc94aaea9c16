"""The kernel's side of a FUSE file system, spoken without a library: mounting, requests, replies.

pyfuse3 has no fallocate, and a request that is to hang would need a task of its own. The protocol is a header and a
structure for each request, and one thread can keep as many of them waiting as it likes.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

MAX_WRITE = 1 << 20
_BUFFER_BYTES = MAX_WRITE + (64 << 10)

_IN_HEADER = struct.Struct("<IIQQIIIHH")
_OUT_HEADER = struct.Struct("<IiQ")
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_DIRENT = struct.Struct("<QQII")

_MAX_PAGES, _PARALLEL_DIROPS = 1 << 22, 1 << 18

DIRECT_IO, PARALLEL_DIRECT_WRITES = 1 << 0, 1 << 6
"""How a file is open: no page cache between the client and this process; writes that do not grow it side by side."""


class Opcode(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43


UNANSWERED = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT, Opcode.DESTROY})
# An answer to INTERRUPT would say "ask again": what hangs here hangs until the test lets it go, as on a real disk.


@dataclass(slots=True)
class Request:
    opcode: int
    unique: int
    node: int
    uid: int
    gid: int
    body: memoryview | bytes
    arrived: int = 0
    """How many operations the log had when this came."""
    released: bool = field(default=False)
    """Whether a hung request may go on; rules do not look at it again."""

    def names(self, offset: int = 0) -> list[str]:
        """The strings behind the structure, which end in a zero byte each."""
        return [os.fsdecode(name) for name in bytes(self.body[offset:]).split(b"\0")[:-1]]

    def kept(self) -> Request:
        """The same request, in memory of its own."""
        self.body = bytes(self.body)
        return self


class Channel:
    """The descriptor of one mount."""

    def __init__(self, mountpoint: Path) -> None:
        self.mountpoint = mountpoint
        self.descriptor = _mount(mountpoint)
        os.set_blocking(self.descriptor, False)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)

    def requests(self) -> Iterator[Request]:
        """Yield the requests that have come; each overwrites the body of the one before. OSError ENODEV: unmounted."""
        while True:
            try:
                size = os.readv(self.descriptor, [self._buffer])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):  # taken back while it was being read
                    continue
                raise
            _, opcode, unique, node, uid, gid, _, _, _ = _IN_HEADER.unpack_from(self._buffer)
            yield Request(opcode, unique, node, uid, gid, self._view[_IN_HEADER.size : size])

    def reply(self, request: Request, *parts: bytes | memoryview) -> None:
        self._send(_OUT_HEADER.pack(_OUT_HEADER.size + sum(map(len, parts)), 0, request.unique), *parts)

    def refuse(self, request: Request, code: int) -> None:
        self._send(_OUT_HEADER.pack(_OUT_HEADER.size, -code, request.unique))

    def _send(self, *parts: bytes | memoryview) -> None:
        try:
            os.writev(self.descriptor, parts)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):  # nobody waits for it any more
                raise

    def answer_init(self, request: Request) -> None:
        major, minor, readahead, flags = struct.unpack_from("<IIII", request.body)
        assert (major, minor >= 31) == (7, True), f"the kernel speaks FUSE {major}.{minor}"
        wanted = flags & (_MAX_PAGES | _PARALLEL_DIROPS)  # not WRITEBACK_CACHE: a write is here when write(2) returns
        self.reply(request, _INIT_OUT.pack(7, 31, readahead, wanted, 64, 48, MAX_WRITE, 1, MAX_WRITE // 4096, 0, 0))

    def unmount(self) -> None:
        unmount(self.mountpoint)


def unmount(mountpoint: Path) -> None:
    """Take it away, in use or not."""
    subprocess.run(["fusermount3", "-u", "-z", "-q", str(mountpoint)], check=False, capture_output=True)


def _mount(mountpoint: Path) -> int:
    options = "default_permissions,subtype=recorder,fsname=recorder" + (",allow_other" if os.geteuid() == 0 else "")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subprocess.run(
            ["fusermount3", "-o", options, "--", str(mountpoint)],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            check=True,
        )
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2][:4])
    return descriptors[0]


def attributes(status: os.stat_result, number: int) -> bytes:
    second = 10**9
    times = [moment % (1 << 64) for moment in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)]
    return _ATTR.pack(
        number,
        status.st_size,
        status.st_blocks,
        *(moment // second for moment in times),
        *(moment % second for moment in times),
        status.st_mode,
        status.st_nlink,
        status.st_uid,
        status.st_gid,
        status.st_rdev & 0xFFFFFFFF,
        4096,
        0,
    )


def attributes_reply(status: os.stat_result, number: int) -> bytes:
    return bytes(16) + attributes(status, number)  # valid for no time: the kernel asks each time


def entry_reply(status: os.stat_result, number: int) -> bytes:
    return _ENTRY.pack(number, 0, 0, 0, 0, 0) + attributes(status, number)


def directory_entry(number: int, offset: int, kind: int, name: bytes) -> bytes:
    return _DIRENT.pack(number, offset, len(name), kind) + name + bytes(-len(name) % 8)
