"""Answers to the kernel's requests, in the kernel's format: the structures of linux/fuse.h, version 7.23 and later.

Each answer is packed by one `struct.pack_into` and sent unchanged. libfuse's functions take structures with a dozen
fields, and each assignment to a field would cross from Python to C.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from struct import Struct
from typing import TypeAlias

Attributes: TypeAlias = tuple[int, ...]
"""The fields of `struct fuse_attr`, as `attributes` makes them."""

OPEN_DIRECT_IO, OPEN_KEEP_CACHE, OPEN_NOFLUSH = 1 << 0, 1 << 1, 1 << 5
"""Flags of an open file: the file bypasses the page cache; the cached pages are still right; a close needs no FLUSH."""

SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_ATIME, SET_MTIME = (1 << bit for bit in range(6))
"""Flags of a SETATTR request: the attributes that the request sets."""

_ATTRIBUTES = "QQQqqqIIIIIIIIII"
_ENTRY = Struct("=QQQQII" + _ATTRIBUTES)
_ENTRY_OPEN = Struct("=QQQQII" + _ATTRIBUTES + "QII")
_ATTR = Struct("=QII" + _ATTRIBUTES)
_OPEN = Struct("=QII")
_COUNT = Struct("=II")
_STATFS = Struct("=QQQQQIIII24x")
_DIRENT = Struct("=QQQQII" + _ATTRIBUTES + "QQII")

_NS = 1_000_000_000
_PADDING = [bytes(-length % 8) for length in range(8)]


def attributes(
    number: int,
    mode: int,
    nlink: int,
    uid: int,
    gid: int,
    size: int,
    atime_ns: int,
    mtime_ns: int,
    ctime_ns: int,
    device: int = 0,
    block_bytes: int = 4096,
) -> Attributes:
    """Return the attributes that `stat` shows. `mode` includes the file type.

    Blocks are counted for the whole size. If fewer blocks were shown, `cp` would treat the file as a file with holes,
    and lose its bytes.
    """
    atime, atime_ns = divmod(atime_ns, _NS)
    mtime, mtime_ns = divmod(mtime_ns, _NS)
    ctime, ctime_ns = divmod(ctime_ns, _NS)
    blocks = (size + 511) // 512
    # fmt: off
    return (number, size, blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns,
            mode, nlink, uid, gid, device, block_bytes, 0)
    # fmt: on


class Answers:
    """Packs answers into `out`. Each method returns the length of its answer. `send` is for answers that do not fit
    into `out`.

    Names are valid for zero seconds, because programs remove and replace names by calls that the kernel does not see.
    `valid_s`: the time for which the kernel may keep the attributes, see `kvfs.mount.grants`.
    """

    def __init__(self, out: memoryview, send: Callable[[bytes | memoryview], int]) -> None:
        self._out = out
        self.data = send

    def entry(self, attributes: Attributes, node: int, valid_s: int = 0) -> int:
        """Pack the answer for a name that was found or made. The kernel will know the file as `node`."""
        _ENTRY.pack_into(self._out, 0, node, 0, 0, valid_s, 0, 0, *attributes)
        return _ENTRY.size

    def attr(self, attributes: Attributes, valid_s: int = 0, *, for_c: bool = False) -> int:
        """Pack attributes. `for_c`: C may keep them instead of the kernel."""
        _ATTR.pack_into(self._out, 0, *((0, 0, valid_s) if for_c else (valid_s, 0, 0)), *attributes)
        return _ATTR.size

    def opened(self, handle: int, flags: int = 0) -> int:
        _OPEN.pack_into(self._out, 0, handle, flags, 0)
        return _OPEN.size

    def created(self, attributes: Attributes, handle: int, flags: int) -> int:
        """Pack the answer for a file that was made and opened."""
        _ENTRY_OPEN.pack_into(self._out, 0, attributes[0], 0, 0, 0, 0, 0, *attributes, handle, flags, 0)
        return _ENTRY_OPEN.size

    def count(self, num_bytes: int) -> int:
        """Pack a number of bytes: the size of written data, or of an attribute."""
        _COUNT.pack_into(self._out, 0, num_bytes, 0)
        return _COUNT.size

    def statfs(
        self,
        *,
        block_bytes: int,
        num_blocks: int,
        num_free: int,
        num_available: int,
        num_files: int,
        num_free_files: int,
        name_bytes: int,
    ) -> int:
        """Pack the figures that `df` shows."""
        blocks = (num_blocks, num_free, num_available, num_files, num_free_files)
        _STATFS.pack_into(self._out, 0, *blocks, block_bytes, name_bytes, block_bytes, 0)
        return _STATFS.size


def listing_entry_bytes(name: bytes) -> int:
    """Return the length of a `listing_entry` in bytes."""
    return (_DIRENT.size + len(name) + 7) & ~7


def listing_entry(name: bytes, attributes: Attributes, node: int, next_offset: int, valid_s: int = 0) -> bytes:
    """Pack a name of a directory with its attributes. The kernel asks for the next name at `next_offset`."""
    number, mode, length = attributes[0], attributes[9], len(name)
    file_type = stat.S_IFMT(mode) >> 12
    packed = _DIRENT.pack(node, 0, 0, valid_s, 0, 0, *attributes, number, next_offset, length, file_type)
    return packed + name + _PADDING[(_DIRENT.size + length) % 8]
