"""Until when pages keep their frames, by advice on files that have them; and how many pages do.

Pages of one file are kept until one time, so the number is known by times: a call looks at no page but its own.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvfs.pages.free_list import IntArray


class Kept:
    """Pages that advice keeps in memory."""

    __slots__ = ("_ends", "_num", "_num_until", "_top", "until")

    def __init__(self, until: npt.NDArray[np.float64]) -> None:
        """`until`: a column of times, all 0."""
        self.until = until
        """Of each page; 0, or a time that is over: no advice keeps it."""
        self._num_until: dict[float, int] = {}
        """Pages by time, of times to come."""
        self._ends: list[float] = []
        self._num = 0
        self._top = 0  # no page from there on was ever kept

    def num(self, now_s: float) -> int:
        """Pages that are kept still."""
        while self._ends and self._ends[0] <= now_s:
            self._num -= self._num_until.pop(heappop(self._ends))
        return self._num

    def extend(self, pages: IntArray, until_s: float) -> None:
        """Keep pages until then at least."""
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
        """No advice keeps these pages any more; a page may be named twice."""
        if not self._num:
            return
        pages = np.unique(pages)
        self.left(self.until[pages])
        self.until[pages] = 0

    def left(self, until_s: npt.NDArray[np.float64]) -> None:
        """Pages that were kept until these times are not any more; 0: one was not."""
        times, nums = np.unique(until_s[until_s > 0], return_counts=True)
        for time_s, num in zip(times.tolist(), nums.tolist(), strict=True):
            if time_s in self._num_until:
                self._num_until[time_s] -= num
                self._num -= num

    def check(self) -> None:
        """Raise AssertionError unless as many pages are kept as is known."""
        until = self.until[: self._top]
        times, nums = np.unique(until[until > 0], return_counts=True)
        counted = dict(zip(times.tolist(), nums.tolist(), strict=True))
        known = self._num_until
        if any(counted.get(each, 0) != num for each, num in known.items()) or sum(known.values()) != self._num:
            raise AssertionError(f"advice is said to keep {known} pages until then, and keeps {counted}")
