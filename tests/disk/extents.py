"""Ranges of bytes that lie apart from each other: which parts of a file there is room for."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Extents:
    __slots__ = ("_ends", "_starts", "total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0

    def gaps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of this range that lie in no extent, from left to right."""
        place = bisect_right(self._ends, start)
        while start < end:
            if place == len(self._starts) or self._starts[place] >= end:
                yield start, end
                return
            if start < self._starts[place]:
                yield start, self._starts[place]
            start = self._ends[place]
            place += 1

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._replace(first, last, [(start, end)])

    def remove(self, start: int, end: int | None = None) -> None:
        """Take this range away, or everything from `start` on."""
        if end is None:
            end = max(start, self._ends[-1]) if self._ends else start
        if start >= end:
            return
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first >= last:
            return
        left, right = self._starts[first], self._ends[last - 1]
        kept = [(low, high) for low, high in ((left, min(start, right)), (max(end, left), right)) if low < high]
        self._replace(first, last, kept)

    def _replace(self, first: int, last: int, ranges: list[tuple[int, int]]) -> None:
        old = sum(self._ends[first:last]) - sum(self._starts[first:last])
        self._starts[first:last] = [low for low, _ in ranges]
        self._ends[first:last] = [high for _, high in ranges]
        self.total += sum(high - low for low, high in ranges) - old
