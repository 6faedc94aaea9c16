"""How often an account refers to each page, and to how many different ones.

It is one array of integers, committed as it is touched. Counting a file costs a few passes of numpy over its page
numbers (0.3 ms for 32,768 pages, 5 µs for one), never a Python loop.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvfs.pages.free_list import IntArray

_ONE = np.int32(1)
"""Of the counts' own type: 32,768 pages take 50 µs; with a Python int, numpy falls back to a cast of each, 1.8 ms."""


class Distinct:
    """Counts how many pages are named, each once. The scratch memory for it is shared."""

    __slots__ = ("_places",)

    def __init__(self, num_pages: int) -> None:
        self._places = np.zeros(num_pages, np.int32)

    def __call__(self, pages: IntArray) -> int:
        if pages.size < 2:
            return pages.size
        order = np.arange(pages.size, dtype=np.int32)
        self._places[pages] = order  # of several mentions one wins: a sort would take ten times as long
        return int(np.count_nonzero(self._places[pages] == order))


class PageCounts:
    """References to pages. `num_pages` is how many pages have any."""

    __slots__ = ("_counts", "_distinct", "num_pages")

    def __init__(self, num_pages: int, distinct: Distinct) -> None:
        self._counts = np.zeros(num_pages, np.int32)
        self._distinct = distinct
        self.num_pages = 0

    def of(self, pages: IntArray) -> IntArray:
        """How often each of these pages is referred to."""
        found: IntArray = self._counts[pages]
        return found

    def all(self) -> IntArray:
        """Every page that is referred to."""
        return np.flatnonzero(self._counts).astype(np.int32)

    def num_new(self, pages: IntArray) -> int:
        """How many of these pages are not referred to yet."""
        return self._distinct(pages[self._counts[pages] == 0])

    def add_new(self, pages: IntArray) -> None:
        """Count pages that nobody referred to, each named once."""
        self._counts[pages] = 1
        self.num_pages += pages.size

    def add(self, pages: IntArray) -> None:
        """Count each mention of a page."""
        self.num_pages += self.num_new(pages)
        np.add.at(self._counts, pages, _ONE)  # a plain += would count a page named twice only once

    def subtract(self, pages: IntArray) -> None:
        """Take each mention of a page back."""
        np.subtract.at(self._counts, pages, _ONE)
        gone = pages[self._counts[pages] <= 0]
        if gone.size:
            assert not self._counts[gone].any(), f"pages {gone[self._counts[gone] < 0]} taken back too often"
            self.num_pages -= self._distinct(gone)

    def add_all(self, other: PageCounts) -> None:
        """Count everything that another counts."""
        self._combine(np.add, other)

    def subtract_all(self, other: PageCounts) -> None:
        """Take back everything that another counts."""
        self._combine(np.subtract, other)

    def _combine(self, operation: Callable[..., IntArray], other: PageCounts) -> None:
        operation(self._counts, other._counts, out=self._counts)
        self.num_pages = int(np.count_nonzero(self._counts))

    def check(self, counted: npt.NDArray[np.int64], who: str) -> None:
        """Raise AssertionError unless these are the references to each page."""
        wrong = np.flatnonzero(self._counts != counted)
        if wrong.size:
            some = wrong[:8]
            raise AssertionError(
                f"{who} is charged {self._counts[some]} references to pages {some}, holds {counted[some]}"
            )
        num_pages = int(np.count_nonzero(counted))
        if self.num_pages != num_pages:
            raise AssertionError(f"{who} is charged {self.num_pages} pages, holds {num_pages}")
