"""Columns: the state of pages and frames, as `columns.h` declares it, in arrays of numpy.

Columns are reserved address space, as long as numbers may ever grow. A part takes memory once it is written: ten
million unused numbers take none, and a pool that grows moves nothing.
"""

from __future__ import annotations

import math
import mmap
from itertools import accumulate
from typing import Any

import numpy as np

from kvfs._pages import ffi

MOST_NUMBERS = 1 << 28
"""Page numbers that a pool may grow to: 2^33 entries, and 90 GB of address space."""
_MAP_NORESERVE = 0x4000  # `mmap` has the name from Python 3.13 on


class Numbers:
    """A column of numbers that may be missing. It stores complements: zero bytes are -1, none."""

    __slots__ = ("_stored",)

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getitem__(self, key: Any) -> Any:
        return ~self._stored[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._stored[key] = ~value

    def has(self, key: Any) -> Any:
        """Return which entries have a number: faster than a comparison with -1."""
        return self._stored[key] != 0


class Columns:
    """The columns of a struct of `columns.h`, by field: zeros."""

    __slots__ = ("_of",)

    def __init__(self, struct: str, room: int = MOST_NUMBERS) -> None:
        items = {name: field.type.item for name, field in ffi.typeof(struct).fields}
        sizes = (-(-room * ffi.sizeof(item) // mmap.PAGESIZE) * mmap.PAGESIZE for item in items.values())
        *offsets, num_bytes = accumulate(sizes, initial=0)
        region = reserve(num_bytes)
        places = zip(items.items(), offsets, strict=True)
        self._of = {name: _column(region, offset, room, item) for (name, item), offset in places}

    def __getitem__(self, name: str) -> Any:
        return self._of[name]


def reserve(num_bytes: int) -> mmap.mmap:
    """Return zeros that take memory page by page, where they are written."""
    try:
        region = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise MemoryError(
            f"no {num_bytes >> 30} GiB of address space, which take no memory: allow them (`ulimit -v unlimited`, "
            "`sysctl vm.overcommit_memory=0`)"
        ) from error
    region.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would take 2 MiB for the first byte
    return region


def _column(region: mmap.mmap, offset: int, room: int, item: Any) -> Any:
    if item.kind == "struct":
        return Numbers(_column(region, offset, room, item.fields[0][1].type))
    shape, item = ((room, item.length), item.item) if item.kind == "array" else ((room,), item)
    dtype = np.dtype(item.cname.strip("_").lower().removesuffix("_t"))
    return np.frombuffer(region, dtype, math.prod(shape), offset).reshape(shape)
