"""The default policy: a page of memory is worth the time that it saves, for each second that the file keeps the page.

A file that is used again saves the time to read its pages. So the worth of each of its pages is this reading time,
divided by the number of pages, times the chance per second that the file is used now. The reading time is known. The
chance depends on how long the file has been idle: a tool that has not answered for a minute is not a tool that takes
0.1 s.

From the gaps of all files, the chance is computed as the Gittins index: the best rate over all possible waiting times.
The rate of a waiting time is (the share of gaps that end within this time) / (the mean wait until the gap or the time
ends). So a file that is idle for as long as tools take is worth much. A file that is idle for longer has the worth that
follows from the pauses of people.

A file with gaps of its own is likely to come back after its usual gap. The weight of this prediction depends on two
things: how alike its gaps are, and how well they explain that the file is still idle. A file whose tools took 0.1 s,
and which has been idle for 5 s, is not judged by its own gaps. Without the first of these two, pauses of people, which
vary freely, were taken for habits, and 40 % more pages were read.
"""

from __future__ import annotations

import numpy as np

from kvfs.tiers.policy import NUM_BUCKETS, Files, FloatArray, Gaps

_PRIOR = 1.0 / NUM_BUCKETS
"""Number of gaps of each length that the policy assumes at the start. Before real gaps are known, these assumed gaps
make the chance fall with idleness, as under LRU.
"""
_LEAST_SPREAD = 0.2
"""The least spread, as a share of a file's usual gap. A few gaps do not predict the next gap better than this."""
_SHORTEST_S = 1e-4


def rank(files: Files, gaps: Gaps) -> FloatArray:
    saved_s = np.maximum(files.bring_s, _SHORTEST_S) / np.maximum(files.num_pages, 1)
    again = files.num_uses / (files.num_uses + 1)  # the chance that the file is used at all: higher after many uses
    worth: FloatArray = chance_a_second(files, gaps) * again * saved_s
    return worth


def chance_a_second(files: Files, gaps: Gaps) -> FloatArray:
    """Return the chance per second that each file is used now, given the time for which it has been idle."""
    of_all = np.exp(np.interp(np.log(np.maximum(files.idle_s, _SHORTEST_S)), *_index(gaps)))
    is_known = ~np.isnan(files.gap_s + files.gap_spread_s)  # the spread is unknown until the second gap
    gap_s = np.where(is_known, files.gap_s, 0)
    spread_s = np.maximum(np.where(is_known, files.gap_spread_s, 0), _LEAST_SPREAD * gap_s) + _SHORTEST_S
    of_own = 1 / (np.maximum(gap_s - files.idle_s, 0) + spread_s)
    # By Bayes: is the present gap one of the file's usual gaps, or one that any file may have? For both cases it is
    # known how likely a gap is to last this long.
    alike = np.maximum(1 - spread_s / np.maximum(gap_s, _SHORTEST_S), 0) ** 2
    usual = alike * files.num_uses * np.exp(-np.maximum(files.idle_s - gap_s, 0) / spread_s)
    other = gaps.longer_than(files.idle_s) + _PRIOR
    own_share = np.where(is_known, usual / (usual + other), 0)
    chance: FloatArray = own_share * of_own + (1 - own_share) * of_all
    return chance


def _index(gaps: Gaps) -> tuple[FloatArray, FloatArray]:
    """Return the logarithms of idle times, and the logarithms of the index at these times."""
    counts, ends_s = gaps.counts + _PRIOR, Gaps.bounds_s()
    begins_s = np.concatenate(([0.0], ends_s[:-1]))
    # [begin, end]: the number of gaps that end in the buckets from begin to end, and the total time waited
    is_between = np.triu(np.ones((NUM_BUCKETS, NUM_BUCKETS), np.bool_))
    comes = np.cumsum(np.where(is_between, counts, 0), axis=1)
    left = np.cumsum(counts[::-1])[::-1][:, None] - comes
    ends = ends_s - begins_s[:, None]
    waited = np.cumsum(np.where(is_between, counts * ends, 0), axis=1) + left * ends
    rates = np.where(is_between, comes / np.where(is_between, waited, 1), 0)
    return np.log(np.maximum(begins_s, ends_s[0] / 2)), np.log(rates.max(axis=1))
