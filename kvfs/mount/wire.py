"""Answers to the kernel's requests, in its own format: the structures of linux/fuse.h, version 7.23 and later.

Packed here and sent as they are: one `struct.pack_into` an answer, where libfuse's functions would take a dozen fields
one by one, each a crossing from Python to C.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from struct import Struct
from typing import TypeAlias

Attributes: TypeAlias = tuple[int, ...]
"""The fields of `struct fuse_attr`; made by `attributes`."""

OPEN_DIRECT_IO, OPEN_KEEP_CACHE, OPEN_NOFLUSH = 1 << 0, 1 << 1, 1 << 5
"""Of an open file: past the page cache; what is cached is still right; closing needs no FLUSH."""

SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_ATIME, SET_MTIME = (1 << bit for bit in range(6))
"""What a SETATTR sets."""

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
    """What `stat` shows. `mode` with the type.

    Blocks are counted in full, whatever is behind them: less would be a hole to `cp`, and its bytes lost.
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
    """Packs answers into `out`; each method returns the length. `send` takes what does not fit there.

    Entries and attributes are valid for no time at all: LIPs change files behind the kernel's back.
    """

    def __init__(self, out: memoryview, send: Callable[[bytes | memoryview], int]) -> None:
        self._out = out
        self.data = send

    def entry(self, attributes: Attributes, node: int) -> int:
        """A name was found or made; the kernel is to ask for it as `node`."""
        _ENTRY.pack_into(self._out, 0, node, 0, 0, 0, 0, 0, *attributes)
        return _ENTRY.size

    def attr(self, attributes: Attributes) -> int:
        _ATTR.pack_into(self._out, 0, 0, 0, 0, *attributes)
        return _ATTR.size

    def opened(self, handle: int, flags: int = 0) -> int:
        _OPEN.pack_into(self._out, 0, handle, flags, 0)
        return _OPEN.size

    def created(self, attributes: Attributes, handle: int, flags: int) -> int:
        """A file was made and opened."""
        _ENTRY_OPEN.pack_into(self._out, 0, attributes[0], 0, 0, 0, 0, 0, *attributes, handle, flags, 0)
        return _ENTRY_OPEN.size

    def count(self, num_bytes: int) -> int:
        """So much was written; or so long is an attribute."""
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
        """What `df` shows."""
        blocks = (num_blocks, num_free, num_available, num_files, num_free_files)
        _STATFS.pack_into(self._out, 0, *blocks, block_bytes, name_bytes, block_bytes, 0)
        return _STATFS.size


def listing_entry_bytes(name: bytes) -> int:
    """How long `listing_entry` makes it."""
    return (_DIRENT.size + len(name) + 7) & ~7


def listing_entry(name: bytes, attributes: Attributes, node: int, next_offset: int) -> bytes:
    """One name of a directory, with its attributes. The next one is asked for at `next_offset`."""
    number, mode, length = attributes[0], attributes[9], len(name)
    file_type = stat.S_IFMT(mode) >> 12
    packed = _DIRENT.pack(node, 0, 0, 0, 0, 0, *attributes, number, next_offset, length, file_type)
    return packed + name + _PADDING[(_DIRENT.size + length) % 8]
