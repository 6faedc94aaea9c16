"""Free pages of a pool, given out as consecutive runs where possible.

Bits and a tree of blocks in C (`free_list.c`): a call's work is bounded by the pages that it names, whatever the
capacity. A byte a page, and passes of numpy over all of them, took 9 ms for a run in ten million pages.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvfs._pages import ffi, lib

IntArray: TypeAlias = npt.NDArray[np.int32]


class FreeList:
    """The free pages of a pool of `num_pages`; every page is free at first."""

    __slots__ = ("core",)

    def __init__(self, num_pages: int) -> None:
        self.core = _new_list(num_pages)

    @property
    def count(self) -> int:
        """Free pages."""
        return int(self.core.num_free)

    @property
    def num_pages(self) -> int:
        """Pages, free or taken."""
        return int(self.core.num_pages)

    @property
    def top(self) -> int:
        """No page from there on was ever taken."""
        return int(self.core.top)

    def grow(self, num_pages: int) -> None:
        """Have more pages; the new ones are free."""
        taken = np.flatnonzero(~self.bitmap(self.top)).astype(np.int32)
        larger = _new_list(num_pages)
        lib.free_list_set(larger, pointer(taken), len(taken), False)
        self.core = larger

    def take(self, count: int, *, lowest: bool = False) -> IntArray:
        """Take `count` pages, which must be free: the lowest run that fits, else the lowest pieces.

        `lowest`: the lowest pages, runs or not.
        """
        assert 0 <= count <= self.count, f"{count} pages wanted, {self.count} free"
        pages = np.empty(count, np.int32)
        if count:
            (lib.free_list_take_lowest if lowest else lib.free_list_take)(self.core, count, pointer(pages))
        return pages

    def give(self, pages: IntArray) -> None:
        """Take pages back; a page may be named twice."""
        self._set(pages, are_free=True)

    def hold(self, pages: IntArray) -> None:
        """Take these pages, free or not."""
        self._set(pages, are_free=False)

    def _set(self, pages: IntArray, *, are_free: bool) -> None:
        wrong = lib.free_list_set(self.core, pointer(pages), len(pages), are_free)
        assert not wrong, f"pages {pages} are not all below {self.num_pages}"

    def bitmap(self, stop: int | None = None) -> npt.NDArray[np.bool_]:
        """Return which pages are free, of all or of those before `stop`: a copy, for the audit."""
        stop = self.num_pages if stop is None else stop
        taken = np.frombuffer(ffi.buffer(self.core.taken, stop // 8 + 1), np.uint8)
        found: npt.NDArray[np.bool_] = np.unpackbits(taken, count=stop, bitorder="little") == 0
        return found

    def check(self) -> None:
        """Raise AssertionError unless what is known of blocks, and the count, are what the pages say."""
        if not lib.free_list_is_sound(self.core):
            raise AssertionError(f"the list of free pages, {self.count} of {self.num_pages}, contradicts itself")


def _new_list(num_pages: int) -> Any:
    found = ffi.gc(lib.free_list_new(num_pages), lib.free_list_delete)
    if not found:
        raise MemoryError(f"no memory for a list of {num_pages} pages")
    return found


def pointer(pages: IntArray) -> object:
    """Return page numbers for C, as they are or as a copy."""
    return ffi.from_buffer("int32_t[]", np.ascontiguousarray(pages, np.int32))
