"""Counts of references to each page, for the pool and for each account. Also the sizes of pages.

Counts are one array of integers, which takes memory where it is written. C updates the counts of the pages that a call
names, and tells how many of these pages are new or gone (`counts.c`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs._pages import ffi, lib
from kvfs.pages.free_list import IntArray, pointer

_IS_NONE = -1
"""Result of the C functions when a number is not a page number."""


class Counts:
    """A count for each page, and the number of pages with a count above `floor`."""

    __slots__ = ("_counts", "_owner", "all")

    def __init__(self, num_pages: int, owner: Any, name: str, floor: int = 0, of: IntArray | None = None) -> None:
        """`owner` is the struct of the core whose field `name` has the counts. `of` is a column of zeros for the
        counts.
        """
        self._owner = owner
        self.all: IntArray = np.zeros(num_pages, np.int32) if of is None else of
        """The counts, by page: read-only."""
        self._counts = ffi.addressof(owner, name)
        self._counts.of = ffi.from_buffer("int32_t[]", self.all)
        self._counts.num_pages, self._counts.floor = num_pages, floor

    @property
    def used(self) -> IntArray:
        """Counts of the first pages, up to the last page that ever had a count other than 0."""
        return self.all[: self.top]

    @property
    def top(self) -> int:
        """The lowest page number above all pages that ever had a count."""
        return int(self._counts.top)

    @property
    def num_above(self) -> int:
        """Pages with a count above the floor."""
        return int(self._counts.num_above)

    def add(self, pages: IntArray) -> None:
        """Add 1 to a page's count each time that `pages` names the page."""
        self._done(lib.counts_add(self._counts, 0, pointer(pages), pages.size), pages)

    def subtract(self, pages: IntArray) -> None:
        """Subtract 1 from a page's count each time that `pages` names the page."""
        self._done(lib.counts_subtract(self._counts, 0, pointer(pages), pages.size), pages)

    def combine(self, operation: Callable[..., IntArray], other: Counts) -> None:
        """Add (`np.add`) or subtract (`np.subtract`) all counts of another object."""
        top = self._counts.top = max(self.top, other.top)
        operation(self.all[:top], other.all[:top], out=self.all[:top])
        self._counts.num_above = self._num_above()

    def check(self, what: str) -> None:
        """Raise AssertionError unless `num_above` is right. `what` names the pages above the floor in the message."""
        num_above = self._num_above()
        if self.num_above != num_above:
            raise AssertionError(f"{self.num_above} pages are said to be {what}, {num_above} are")

    def _num_above(self) -> int:
        return int(np.count_nonzero(self.used > self._counts.floor))

    def _done(self, num: int, pages: IntArray) -> None:
        assert num != _IS_NONE, f"pages {pages} are not all below {self._counts.num_pages}"
        assert num >= 0, f"pages {pages[self.all[pages] < 0]} are given back too often"


class PageSizes:
    """Sizes of pages, by the numbers by which accounts know them. Pages of each model may have another size."""

    __slots__ = ("_others", "core")

    def __init__(self, page_bytes: int) -> None:
        self.core = ffi.new("core_sizes *", {"page_bytes": page_bytes})
        self._others = ffi.NULL

    def add(self, first: int, stop: int, page_bytes: int) -> None:
        """Note the size of the pages from `first` to `stop - 1`."""
        if page_bytes != self.core.page_bytes:
            others = [*((each.first, each.stop, each.page_bytes) for each in self._each()), (first, stop, page_bytes)]
            self._others = ffi.new("core_size[]", others)
            self.core.others, self.core.num_others = self._others, len(others)

    def of(self, pages: IntArray, base: int = 0) -> int:
        """Return the size in bytes of each of these pages of a pool with this `base`. The pages belong to one file, so
        all have the same size.
        """
        return int(lib.core_page_bytes(self.core, base, pointer(pages), pages.size))

    def total(self, counts: npt.NDArray[np.integer], base: int = 0) -> int:
        """Return the bytes of all pages with a count other than zero. The first count is of page `base`."""
        num_bytes = int(np.count_nonzero(counts)) * int(self.core.page_bytes)
        for each in self._each():
            num_pages = int(np.count_nonzero(counts[max(0, each.first - base) : max(0, each.stop - base)]))
            num_bytes += num_pages * int(each.page_bytes - self.core.page_bytes)
        return num_bytes

    def _each(self) -> list[Any]:
        return [self._others[at] for at in range(self.core.num_others)]
