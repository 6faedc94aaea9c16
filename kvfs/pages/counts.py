"""Counts of references to each page, in all and of each account; and the sizes of pages.

Counts are one array of integers, committed as it is touched. C counts the pages that a call names (`counts.c`), and
how many of them are new or gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs._pages import ffi, lib
from kvfs.pages.free_list import IntArray, pointer

_IS_NONE = -1
"""Of C: a number is no page's."""


class Counts:
    """A count for each page, and how many pages have a higher one than `floor`."""

    __slots__ = ("_counts", "_owner", "all")

    def __init__(self, num_pages: int, owner: Any, name: str, floor: int = 0, of: IntArray | None = None) -> None:
        """`owner`: the struct of the core that has them, as `name`. `of`: a column of zeros, with room to `grow`."""
        self._owner = owner
        self.all: IntArray = np.zeros(num_pages, np.int32) if of is None else of
        """The counts, by page: to be read."""
        self._counts = ffi.addressof(owner, name)
        self._counts.of = ffi.from_buffer("int32_t[]", self.all)
        self._counts.num_pages, self._counts.floor = num_pages, floor

    def grow(self, num_pages: int) -> None:
        """Count more pages; the new ones have no count."""
        if num_pages > self.all.size:
            grown = np.zeros(num_pages, np.int32)
            grown[: self.top] = self.used
            self.all, self._counts.of = grown, ffi.from_buffer("int32_t[]", grown)
        self._counts.num_pages = num_pages

    @property
    def used(self) -> IntArray:
        """Counts of the first pages, up to the last that ever had one."""
        return self.all[: self.top]

    @property
    def top(self) -> int:
        """No page from there on ever had a count."""
        return int(self._counts.top)

    @property
    def num_above(self) -> int:
        """Pages with a higher count than the floor."""
        return int(self._counts.num_above)

    def add(self, pages: IntArray) -> None:
        """Count each mention of a page."""
        self._done(lib.counts_add(self._counts, pointer(pages), pages.size), pages)

    def subtract(self, pages: IntArray) -> None:
        """Take each mention of a page back."""
        self._done(lib.counts_subtract(self._counts, pointer(pages), pages.size), pages)

    def combine(self, operation: Callable[..., IntArray], other: Counts) -> None:
        """Add (`np.add`), or take back (`np.subtract`), all that another counts."""
        top = self._counts.top = max(self.top, other.top)
        operation(self.all[:top], other.all[:top], out=self.all[:top])
        self._counts.num_above = self._num_above()

    def check(self, what: str) -> None:
        """Raise AssertionError unless as many pages are above the floor as is kept."""
        num_above = self._num_above()
        if self.num_above != num_above:
            raise AssertionError(f"{self.num_above} pages are said to be {what}, {num_above} are")

    def _num_above(self) -> int:
        return int(np.count_nonzero(self.used > self._counts.floor))

    def _done(self, num: int, pages: IntArray) -> None:
        assert num != _IS_NONE, f"pages {pages} are not all below {self._counts.num_pages}"
        assert num >= 0, f"pages {pages[self.all[pages] < 0]} are given back too often"


class PageSizes:
    """Sizes of pages: pages of other models, which are on disk alone, may be larger or smaller than the others."""

    __slots__ = ("_others", "core")

    def __init__(self, page_bytes: int) -> None:
        self.core = ffi.new("core_sizes *", {"page_bytes": page_bytes})
        self._others = ffi.NULL

    def add(self, first: int, stop: int, page_bytes: int) -> None:
        """Pages from `first` to before `stop` have another size."""
        if page_bytes != self.core.page_bytes:
            others = [*((each.first, each.stop, each.page_bytes) for each in self._each()), (first, stop, page_bytes)]
            self._others = ffi.new("core_size[]", others)
            self.core.others, self.core.num_others = self._others, len(others)

    def of(self, pages: IntArray) -> int:
        """Return the bytes of each of these pages, which are of one file."""
        return int(lib.core_page_bytes(self.core, pointer(pages), pages.size))

    def total(self, counts: npt.NDArray[np.integer]) -> int:
        """Return the bytes of all pages whose count is not zero."""
        num_bytes = int(np.count_nonzero(counts)) * int(self.core.page_bytes)
        for each in self._each():
            num_pages = int(np.count_nonzero(counts[each.first : each.stop]))
            num_bytes += num_pages * int(each.page_bytes - self.core.page_bytes)
        return num_bytes

    def _each(self) -> list[Any]:
        return [self._others[at] for at in range(self.core.num_others)]
