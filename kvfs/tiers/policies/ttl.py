"""A time to live: a file stays in memory for this time, and is evicted after it.

Tools answer within some time or, as a rule, much later. The gaps of tools form the short mode of all gaps. The time to
live ends with this mode, as in CacheTTL and Continuum: where the fewest gaps lie, between the gaps of tools and the
gaps of people. A file has a time to live of its own if its gaps were longer than those of tools, but regular.
"""

from __future__ import annotations

import numpy as np

from kvfs.tiers.policy import NUM_BUCKETS, Files, FloatArray, Gaps

DEFAULT_S = 6.0
"""The time to live until enough gaps are known. Within this time, 9 of 10 tools of coding agents have answered."""
_ENOUGH = 16
"""The fewest gaps from which the distribution is estimated."""
_SMOOTH = np.array([1, 2, 3, 2, 1]) / 9  # weights of five neighbouring buckets
_DEPTH = 0.5
"""A valley is at most this share of the peaks on both sides of it. A shallower valley may be due to chance."""
_SPREADS = 2.0
"""A file may still be used again until this many spreads after its usual gap."""


def rank(files: Files, gaps: Gaps) -> FloatArray:
    """Rank files within their time to live above all other files. Within its time to live, a file that has been idle
    for longer is nearer to its return, and is worth more. Of the other files, the file that has been idle longest is
    evicted first.
    """
    of_all_s = time_to_live_s(gaps)
    own_s = files.gap_s + _SPREADS * files.gap_spread_s
    lives_s = np.where(own_s <= 2 * of_all_s, np.fmax(own_s, of_all_s), of_all_s)
    return np.where(files.idle_s <= lives_s, 1 + files.idle_s / lives_s, -files.idle_s)


def time_to_live_s(gaps: Gaps) -> float:
    """Return the gap at which the mode of short gaps ends: the first valley behind a peak. If there is no valley,
    return the 0.9 quantile.
    """
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
