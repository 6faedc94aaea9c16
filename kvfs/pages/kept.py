"""Pages that advice on files keeps in memory: when the advice ends for each page, and how many such pages there are.

The advice on one file ends at one time for all its pages, so pages are counted by this time. A call looks only at its
own pages.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvfs.pages.free_list import IntArray


class KeptPages:
    """Pages that advice keeps in memory."""

    __slots__ = ("_ends", "_num", "_num_until", "_top", "until")

    def __init__(self, until: npt.NDArray[np.float64]) -> None:
        """`until` is a column of times, all 0."""
        self.until = until
        """When the advice ends, for each page. 0, or a past time: no advice keeps the page."""
        self._num_until: dict[float, int] = {}
        """Number of pages for each time at which advice will end."""
        self._ends: list[float] = []
        self._num = 0
        self._top = 0  # no page from here on was ever kept

    def num(self, now_s: float) -> int:
        """Return how many pages are still kept."""
        while self._ends and self._ends[0] <= now_s:
            self._num -= self._num_until.pop(heappop(self._ends))
        return self._num

    def extend(self, pages: IntArray, until_s: float) -> None:
        """Keep pages until `until_s` at least."""
        pages = np.unique(pages)
        pages = pages[self.until[pages] < until_s]
        self.clear(pages)
        if until_s not in self._num_until:
            self._num_until[until_s] = 0
            heappush(self._ends, until_s)
        self.until[pages] = until_s
        self._top = max(self._top, int(pages.max(initial=-1)) + 1)
        self._num_until[until_s] += pages.size
        self._num += pages.size

    def clear(self, pages: IntArray) -> None:
        """Note that advice no longer keeps these pages. A page may be named twice."""
        if not self._num:
            return
        pages = np.unique(pages)
        self.left(self.until[pages])
        self.until[pages] = 0

    def left(self, until_s: npt.NDArray[np.float64]) -> None:
        """Note that pages which were kept until these times are no longer kept. 0: the page was not kept."""
        times, nums = np.unique(until_s[until_s > 0], return_counts=True)
        for time_s, num in zip(times.tolist(), nums.tolist(), strict=True):
            if time_s in self._num_until:
                self._num_until[time_s] -= num
                self._num -= num

    def check(self) -> None:
        """Raise AssertionError unless the counts agree with the column."""
        until = self.until[: self._top]
        times, nums = np.unique(until[until > 0], return_counts=True)
        counted = dict(zip(times.tolist(), nums.tolist(), strict=True))
        known = self._num_until
        if any(counted.get(each, 0) != num for each, num in known.items()) or sum(known.values()) != self._num:
            raise AssertionError(f"advice is said to keep {known} pages until then, and keeps {counted}")
