"""Gaps: the ranges of a plain file that no write has filled, below its size.

A program that restores a file in pieces makes it as long as it is to be, and closes it between two pieces. Such a file
is no image yet, and nothing is wrong with it. Gaps tell it from an image that was cut or spoilt.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

MAX_GAPS = 4096
"""Gaps of one file. A program that leaves more has the first one counted as written: memory is bounded."""


class Gaps:
    """Ranges of bytes, in order, none of which touch. One thread at a time changes them."""

    __slots__ = ("_gaps",)

    def __init__(self) -> None:
        self._gaps: list[range] = []

    def __bool__(self) -> bool:
        return bool(self._gaps)

    def __iter__(self) -> Iterator[range]:
        return iter(self._gaps)

    def grown(self, before: int, after: int) -> None:
        """The file had `before` bytes and has `after`; nobody wrote those between."""
        if before < after:
            goes_on = self._gaps and self._gaps[-1].stop == before
            self._gaps.append(range(self._gaps.pop().start if goes_on else before, after))
            del self._gaps[:-MAX_GAPS]

    def written(self, start: int, stop: int) -> None:
        """A write has filled these bytes."""
        gaps = self._gaps
        if gaps and start < gaps[-1].stop:
            first = bisect_right(gaps, start, key=lambda gap: gap.stop)
            last = bisect_left(gaps, stop, lo=first, key=lambda gap: gap.start)
            if first < last:
                ends = range(gaps[first].start, start), range(stop, gaps[last - 1].stop)
                gaps[first:last] = [end for end in ends if end]
                del gaps[:-MAX_GAPS]

    def cut(self, size: int) -> None:
        """The file has `size` bytes now, fewer than before."""
        while self._gaps and self._gaps[-1].stop > size:
            last = self._gaps.pop()
            if last.start < size:
                self._gaps.append(range(last.start, size))
