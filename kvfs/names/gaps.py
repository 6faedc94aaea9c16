"""Gaps: the ranges below a plain file's size that no write has filled.

A program may restore a file in pieces: it first sets the full size, and closes the file between two pieces. Such a file
is not an image yet, and is not damaged either. The gaps distinguish such a file from an image that was cut or damaged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

MAX_GAPS = 4096
"""The most gaps of one file, so that memory is bounded. If a file gets more gaps, its first gaps count as written."""


class UnfilledRanges:
    """Ranges of bytes in ascending order, with written bytes between any two ranges. Only one thread at a time changes
    them.
    """

    __slots__ = ("_gaps",)

    def __init__(self) -> None:
        self._gaps: list[range] = []

    def __bool__(self) -> bool:
        return bool(self._gaps)

    def __iter__(self) -> Iterator[range]:
        return iter(self._gaps)

    def grown(self, before: int, after: int) -> None:
        """Note that the file grew from `before` bytes to `after` without a write."""
        if before < after:
            goes_on = self._gaps and self._gaps[-1].stop == before
            self._gaps.append(range(self._gaps.pop().start if goes_on else before, after))
            del self._gaps[:-MAX_GAPS]

    def written(self, start: int, stop: int) -> None:
        """Note that a write has filled these bytes."""
        gaps = self._gaps
        if gaps and start < gaps[-1].stop:
            first = bisect_right(gaps, start, key=lambda gap: gap.stop)
            last = bisect_left(gaps, stop, lo=first, key=lambda gap: gap.start)
            if first < last:
                ends = range(gaps[first].start, start), range(stop, gaps[last - 1].stop)
                gaps[first:last] = [end for end in ends if end]
                del gaps[:-MAX_GAPS]

    def cut(self, size: int) -> None:
        """Note that the file was cut to `size` bytes."""
        while self._gaps and self._gaps[-1].stop > size:
            last = self._gaps.pop()
            if last.start < size:
                self._gaps.append(range(last.start, size))
