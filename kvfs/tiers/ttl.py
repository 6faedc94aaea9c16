"""A time to live: tools answer within some time or, as a rule, much later. Until then a file stays, after it it goes.

That time is where the short mode of all gaps ends (CacheTTL and Continuum do so): the emptiest place between the gaps
of tools and those of people. A file that has always taken longer than tools do, but evenly, has its own.
"""

from __future__ import annotations

import numpy as np

from kvfs.tiers.policy import NUM_BUCKETS, Files, FloatArray, Gaps

DEFAULT_S = 6.0
"""While nothing is known of gaps: 9 of 10 tools of coding agents have answered."""
_ENOUGH = 16
"""So many gaps tell of their distribution."""
_SMOOTH = np.array([1, 2, 3, 2, 1]) / 9  # over buckets of half a doubling
_DEPTH = 0.5
"""A valley is a place with at most so much of both the peaks beside it: what is shallower is chance."""
_SPREADS = 2.0
"""So far beyond its usual gap a file may still come back."""


def rank(files: Files, gaps: Gaps) -> FloatArray:
    """Within its time a file that waits longer is nearer to coming back. Then it is worth nothing: oldest first."""
    of_all_s = time_to_live_s(gaps)
    own_s = files.gap_s + _SPREADS * files.gap_spread_s
    lives_s = np.where(own_s <= 2 * of_all_s, np.fmax(own_s, of_all_s), of_all_s)
    return np.where(files.idle_s <= lives_s, 1 + files.idle_s / lives_s, -files.idle_s)


def time_to_live_s(gaps: Gaps) -> float:
    """Where the short mode ends: the valley behind the first peak that has one, else what 9 of 10 gaps are within."""
    counts = gaps.counts
    if counts.sum() < _ENOUGH:
        return DEFAULT_S
    smooth = np.convolve(counts, _SMOOTH, mode="same")
    highest_before = np.maximum.accumulate(smooth)
    highest_behind = np.maximum.accumulate(smooth[::-1])[::-1]
    rises = np.minimum(highest_before, highest_behind)
    is_valley = (smooth <= _DEPTH * rises) & (rises > counts.sum() / NUM_BUCKETS)
    if not is_valley.any():
        return gaps.quantile_s(0.9)
    first = int(np.argmax(is_valley))
    ends = np.flatnonzero(~is_valley[first:])
    valley = smooth[first : first + (int(ends[0]) if len(ends) else NUM_BUCKETS)]
    return float(gaps.bounds_s()[first + int(np.argmin(valley))])
