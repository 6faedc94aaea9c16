"""What a policy of the tiers sees, and says: which files to keep in memory, by arrays over files.

A policy is a function `rank(files, gaps)`: the worth of keeping each file in memory, as numbers. What is worth least
goes to disk first. It is called when room is needed and in a replay of a trace alike. It keeps nothing between calls.

Priorities, pins and advice are not its business: files that may not go are not among these; those of a lower priority,
and those that are cold by advice, go before it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import ceil, log2
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]

NUM_BUCKETS = 64
_FIRST_GAP_S = 2.0**-12
_BUCKETS_A_DOUBLING = 2


@dataclass(frozen=True, slots=True)
class Files:
    """KV files with pages in memory that nothing computes with: arrays of one length, a place for each."""

    num_pages: FloatArray
    """In memory: what going down would free."""
    idle_s: FloatArray
    """Since its last use ended."""
    num_uses: FloatArray
    """So far; a use is a call, or calls that follow each other without a gap."""
    gap_s: FloatArray
    """What usually lies between two uses of it: a mean in which the last ones count most; not a number: unknown."""
    gap_spread_s: FloatArray
    """How far its gaps are from that, on average; not a number: unknown."""
    bring_s: FloatArray
    """What bringing these pages back would take."""
    compute_s: FloatArray
    """What computing their entries again would take; not a number: unknown."""
    is_open: npt.NDArray[np.bool_]
    """Some program has it open."""

    def __len__(self) -> int:
        return len(self.num_pages)

    def at(self, places: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Files:
        """Some of them."""
        return Files(*(getattr(self, each.name)[places] for each in fields(self)))


class Gaps:
    """How long the gaps between two uses of a file were, of all files lately: a histogram by powers of 2 ** 0.5."""

    __slots__ = ("counts",)
    BUCKET_RATIO = 2.0 ** (1 / _BUCKETS_A_DOUBLING)
    """Of the longest gap of a bucket to its shortest."""

    def __init__(self, counts: FloatArray | None = None) -> None:
        self.counts = np.zeros(NUM_BUCKETS) if counts is None else counts

    def add(self, gap_s: float) -> None:
        place = ceil(log2(max(gap_s, _FIRST_GAP_S) / _FIRST_GAP_S) * _BUCKETS_A_DOUBLING)  # numpy takes 10 µs for it
        self.counts[min(place, NUM_BUCKETS - 1)] += 1

    def fade(self, factor: float) -> None:
        """What was counts less from now on."""
        self.counts *= factor

    @staticmethod
    def bucket_of(gap_s: FloatArray | np.float64) -> npt.NDArray[np.intp]:
        places = np.ceil(np.log2(np.maximum(gap_s, _FIRST_GAP_S) / _FIRST_GAP_S) * _BUCKETS_A_DOUBLING)
        found: npt.NDArray[np.intp] = np.clip(places, 0, NUM_BUCKETS - 1).astype(np.intp)
        return found

    @staticmethod
    def bounds_s() -> FloatArray:
        """The longest gap of each bucket; of the last one there is none longer."""
        bounds: FloatArray = _FIRST_GAP_S * 2.0 ** (np.arange(NUM_BUCKETS) / _BUCKETS_A_DOUBLING)
        return bounds

    def longer_than(self, idle_s: FloatArray) -> FloatArray:
        """The share of all gaps that were longer."""
        total = self.counts.sum()
        if not total:
            return np.ones_like(idle_s)
        above = total - np.cumsum(self.counts)
        share: FloatArray = (above / total)[self.bucket_of(idle_s)]
        return share

    def quantile_s(self, share: float) -> float:
        """So many of all gaps were no longer than this; 0 if there was none."""
        total = self.counts.sum()
        if not total:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return float(self.bounds_s()[min(place, NUM_BUCKETS - 1)])


Rank: TypeAlias = Callable[[Files, Gaps], FloatArray]
"""The worth of keeping each file in memory."""
