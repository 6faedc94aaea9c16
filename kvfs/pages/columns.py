"""Columns: the state of pages, frames and files, as `columns.h` declares it, in numpy arrays.

Columns are reserved address space, with room for as many rows as there may ever be. A part of a column takes memory
when it is first written. So ten million unused page numbers take no memory, and no column moves when rows are added.
Only rows in use are writable. So a kernel that does not overcommit does not count the other rows as memory.
"""

from __future__ import annotations

import math
import mmap
from itertools import accumulate
from typing import Any

import numpy as np

from kvfs._pages import ffi, lib

MOST_ROWS = 1 << 24
"""The most files in use. Their rows take 2 GiB of address space. The daemon would need 100 GB of memory for so many
files.
"""
_MAP_NORESERVE = 0x4000  # `mmap` has the name from Python 3.13 on


class Numbers:
    """A column of signed integers that may be missing. Complements are stored, so zero bytes are -1, which stands for a
    missing number.
    """

    __slots__ = ("_stored",)

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getitem__(self, key: Any) -> Any:
        return ~self._stored[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._stored[key] = ~value

    def has(self, key: Any) -> Any:
        """Return which items have a number. This is faster than a comparison with -1."""
        return self._stored[key] != 0


class Columns:
    """The columns of a struct in `columns.h`, by field. Every column begins as zeros."""

    __slots__ = ("_items", "_of", "_offsets", "_region", "_room")

    def __init__(self, struct: str, num: int, room: int = 0) -> None:
        """Make `num` rows writable; `grow` adds more, up to `room` or `num`, whichever is larger."""
        self._room = room = max(room, num)
        self._items = {name: field.type.item for name, field in ffi.typeof(struct).fields}
        *self._offsets, num_bytes = accumulate([_whole(room, item) for item in self._items.values()], initial=0)
        self._region = _reserved(num_bytes)
        places, buffer = zip(self._items.items(), self._offsets, strict=True), ffi.buffer(self._region, num_bytes)
        self._of = {name: _column(buffer, offset, room, item) for (name, item), offset in places}
        self.grow(num)

    def grow(self, num: int) -> None:
        """Make `num` rows writable. MemoryError: `room` is too small, or the kernel commits no more memory."""
        if num > self._room:
            raise MemoryError(f"no address space for the state of {num} pages: {self._room} are reserved")
        for item, offset in zip(self._items.values(), self._offsets, strict=True):
            if lib.mprotect(self._region + offset, _whole(num, item), mmap.PROT_READ | mmap.PROT_WRITE) != 0:
                raise MemoryError(f"no memory for the state of {num} pages: the kernel commits to no more")

    def __getitem__(self, name: str) -> Any:
        return self._of[name]

    def tell(self, struct: Any) -> None:
        """Write the columns' addresses into a struct with the same fields."""
        for field, offset in zip(ffi.typeof(struct).fields, self._offsets, strict=True):
            setattr(struct, field[0], ffi.cast(field[1].type, self._region + offset))


def _whole(num: int, item: Any) -> int:
    """Return the bytes of `num` rows, rounded up to whole pages of the machine's memory."""
    return -(-num * int(ffi.sizeof(item)) // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserved(num_bytes: int) -> Any:
    """Return a `char *` to read-only zeros."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    found = lib.mmap(ffi.NULL, num_bytes, mmap.PROT_READ, flags, -1, 0)
    if found == ffi.cast("void *", -1):
        raise MemoryError(
            f"no {num_bytes >> 30} GiB of address space, which take no memory: allow them (`ulimit -v unlimited`)"
        )
    lib.madvise(found, num_bytes, mmap.MADV_NOHUGEPAGE)  # a huge page would take 2 MiB for the first byte
    return ffi.gc(ffi.cast("char *", found), lambda start: lib.munmap(start, num_bytes))


def _column(region: Any, offset: int, room: int, item: Any) -> Any:
    if item.kind == "struct":
        return Numbers(_column(region, offset, room, item.fields[0][1].type))
    shape, item = ((room, item.length), item.item) if item.kind == "array" else ((room,), item)
    dtype = np.dtype(item.cname.strip("_").lower().removesuffix("_t"))
    return np.frombuffer(region, dtype, math.prod(shape), offset).reshape(shape)
