"""Input and output of a policy of the tiers: a function over arrays that ranks files for memory.

A policy is a function `rank(files, gaps)`. The function returns numbers: the worth of keeping each file in memory. The
file with the least worth is evicted first. The daemon calls the function when memory is short, and a replay calls it
for a trace. The function keeps no state between calls.

The daemon itself handles priorities, pins and advice. A pinned file is not in `files`. Files with a lower priority, and
files that are cold by advice, are evicted before the policy's choice.
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
    """KV files that have pages in memory, and with which no call computes. Each array has one number for each file."""

    num_pages: FloatArray
    """Pages in memory, which an eviction would free."""
    idle_s: FloatArray
    """Seconds since the file's last use ended."""
    num_uses: FloatArray
    """Uses so far. Calls that follow each other without a gap are one use."""
    gap_s: FloatArray
    """Usual gap between two uses: a mean in which recent gaps count most. NaN: unknown."""
    gap_spread_s: FloatArray
    """Mean distance of the file's gaps from `gap_s`. NaN: unknown."""
    bring_s: FloatArray
    """Seconds that a read of these pages would take."""
    compute_s: FloatArray
    """Seconds that computing the entries of these pages again would take. NaN: unknown."""
    is_open: npt.NDArray[np.bool_]
    """Whether a program has the file open."""

    def __len__(self) -> int:
        return len(self.num_pages)

    def at(self, places: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Files:
        """Return the files at these places."""
        return Files(*(getattr(self, each.name)[places] for each in fields(self)))


class Gaps:
    """Recent gaps between uses, of all files: a histogram with a bucket for each factor of 2 ** 0.5."""

    __slots__ = ("counts",)
    BUCKET_RATIO = 2.0 ** (1 / _BUCKETS_A_DOUBLING)
    """Ratio of the longest gap of a bucket to the bucket's shortest gap."""

    def __init__(self, counts: FloatArray | None = None) -> None:
        self.counts = np.zeros(NUM_BUCKETS) if counts is None else counts

    def add(self, gap_s: float) -> None:
        place = ceil(log2(max(gap_s, _FIRST_GAP_S) / _FIRST_GAP_S) * _BUCKETS_A_DOUBLING)  # numpy would take 10 µs
        self.counts[min(place, NUM_BUCKETS - 1)] += 1

    def fade(self, factor: float) -> None:
        """Multiply all counts by a factor, so that past gaps count less."""
        self.counts *= factor

    @staticmethod
    def bucket_of(gap_s: FloatArray | np.float64) -> npt.NDArray[np.intp]:
        places = np.ceil(np.log2(np.maximum(gap_s, _FIRST_GAP_S) / _FIRST_GAP_S) * _BUCKETS_A_DOUBLING)
        found: npt.NDArray[np.intp] = np.clip(places, 0, NUM_BUCKETS - 1).astype(np.intp)
        return found

    @staticmethod
    def bounds_s() -> FloatArray:
        """Return the longest gap of each bucket. The last bucket also counts all longer gaps."""
        bounds: FloatArray = _FIRST_GAP_S * 2.0 ** (np.arange(NUM_BUCKETS) / _BUCKETS_A_DOUBLING)
        return bounds

    def longer_than(self, idle_s: FloatArray) -> FloatArray:
        """Return the share of all gaps that were longer than `idle_s`."""
        total = self.counts.sum()
        if not total:
            return np.ones_like(idle_s)
        above = total - np.cumsum(self.counts)
        share: FloatArray = (above / total)[self.bucket_of(idle_s)]
        return share

    def quantile_s(self, share: float) -> float:
        """Return the gap that `share` of all gaps did not exceed. 0: there are no gaps."""
        total = self.counts.sum()
        if not total:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return float(self.bounds_s()[min(place, NUM_BUCKETS - 1)])


Rank: TypeAlias = Callable[[Files, Gaps], FloatArray]
"""Function that returns the worth of keeping each file in memory."""
