"""Free pages of a pool, handed out as consecutive runs where possible.

The bits and the tree of blocks are in C (`free_list.c`). So the work of a call is bounded by the number of pages that
the call names, whatever the capacity. When the list had one byte for each page, and numpy looked at all bytes, the
search for a run among ten million pages took 9 ms.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvfs._pages import ffi, lib

IntArray: TypeAlias = npt.NDArray[np.int32]


class FreeList:
    """The free pages of a pool of `num_pages`. Every page is free at first."""

    __slots__ = ("core",)

    def __init__(self, num_pages: int) -> None:
        self.core = _new_list(num_pages)

    @property
    def count(self) -> int:
        """The number of free pages."""
        return int(self.core.num_free)

    @property
    def num_pages(self) -> int:
        """The number of all pages, free or taken."""
        return int(self.core.num_pages)

    @property
    def top(self) -> int:
        """The lowest page number above all pages that were ever taken."""
        return int(self.core.top)

    def grow(self, num_pages: int) -> None:
        """Add pages, which are free."""
        taken = np.flatnonzero(~self.bitmap(self.top)).astype(np.int32)
        larger = _new_list(num_pages)
        lib.free_list_set(larger, pointer(taken), len(taken), False)
        self.core = larger

    def take(self, count: int, *, lowest: bool = False) -> IntArray:
        """Take `count` pages, which must be free: the lowest run that fits, else the lowest pages.

        `lowest`: take the lowest pages, whether or not they are a run.
        """
        assert 0 <= count <= self.count, f"{count} pages wanted, {self.count} free"
        pages = np.empty(count, np.int32)
        if count:
            (lib.free_list_take_lowest if lowest else lib.free_list_take)(self.core, count, pointer(pages))
        return pages

    def give(self, pages: IntArray) -> None:
        """Return pages to the list. A page may be named twice."""
        self._set(pages, are_free=True)

    def hold(self, pages: IntArray) -> None:
        """Take these pages, whether or not they are free."""
        self._set(pages, are_free=False)

    def _set(self, pages: IntArray, *, are_free: bool) -> None:
        wrong = lib.free_list_set(self.core, pointer(pages), len(pages), are_free)
        assert not wrong, f"pages {pages} are not all below {self.num_pages}"

    def bitmap(self, stop: int | None = None) -> npt.NDArray[np.bool_]:
        """Return for each page below `stop` whether it is free, as a new array for the audit."""
        stop = self.num_pages if stop is None else stop
        taken = np.frombuffer(ffi.buffer(self.core.taken, stop // 8 + 1), np.uint8)
        found: npt.NDArray[np.bool_] = np.unpackbits(taken, count=stop, bitorder="little") == 0
        return found

    def check(self) -> None:
        """Raise AssertionError unless the count and the tree of blocks agree with the bits."""
        if not lib.free_list_is_sound(self.core):
            raise AssertionError(f"the list of free pages, {self.count} of {self.num_pages}, contradicts itself")


def _new_list(num_pages: int) -> Any:
    found = ffi.gc(lib.free_list_new(num_pages), lib.free_list_delete)
    if not found:
        raise MemoryError(f"no memory for a list of {num_pages} pages")
    return found


def pointer(pages: IntArray) -> object:
    """Return page numbers as a pointer for C, copied if necessary."""
    return ffi.from_buffer("int32_t[]", np.ascontiguousarray(pages, np.int32))
