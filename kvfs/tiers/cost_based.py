"""The default: what a page of memory saves, per second that it is kept for a file.

A file that comes back saves what bringing it would have taken. So its worth is the chance that it comes back, per
second, times that, over its pages. The second of these is known. The chance is a question of how long it is idle
already: a tool that has not answered for a minute is no tool of 0.1 s.

For all gaps together it is their index after Gittins, the best rate that any patience gives: over all times that one
may go on waiting, the highest of (the share of gaps that end until then) / (the mean time that one waits). So a file
within the gaps of tools is worth much, and one that has outlived them is worth what people's pauses leave.

A file with gaps of its own comes back when it usually does. How far that is trusted goes by how alike they are, and by
how well they explain that the file is still idle: one whose tools took 0.1 s and that is idle for 5 s is not judged by
them. Without the first, people's pauses, which are of any length, were taken for habits: 40 % more was read.
"""

from __future__ import annotations

import numpy as np

from kvfs.tiers.policy import NUM_BUCKETS, Files, FloatArray, Gaps

_PRIOR = 1.0 / NUM_BUCKETS
"""Gaps of each length that are taken as seen. Alone they make the chance fall with idleness: least recently used."""
_LEAST_SPREAD = 0.2
"""Of a file's usual gap: its next one is not told more exactly by a few."""
_SHORTEST_S = 1e-4


def rank(files: Files, gaps: Gaps) -> FloatArray:
    saved_s = np.maximum(files.bring_s, _SHORTEST_S) / np.maximum(files.num_pages, 1)
    again = files.num_uses / (files.num_uses + 1)  # one that was used often is used again
    worth: FloatArray = chance_a_second(files, gaps) * again * saved_s
    return worth


def chance_a_second(files: Files, gaps: Gaps) -> FloatArray:
    """How fast a file comes back, that is so long idle."""
    of_all = np.exp(np.interp(np.log(np.maximum(files.idle_s, _SHORTEST_S)), *_index(gaps)))
    is_known = ~np.isnan(files.gap_s + files.gap_spread_s)  # of one gap nobody knows whether it is usual
    gap_s = np.where(is_known, files.gap_s, 0)
    spread_s = np.maximum(np.where(is_known, files.gap_spread_s, 0), _LEAST_SPREAD * gap_s) + _SHORTEST_S
    of_own = 1 / (np.maximum(gap_s - files.idle_s, 0) + spread_s)
    # By Bayes: whether this gap is one of its usual ones, or any. Each says how likely it is to last so long.
    alike = np.maximum(1 - spread_s / np.maximum(gap_s, _SHORTEST_S), 0) ** 2
    usual = alike * files.num_uses * np.exp(-np.maximum(files.idle_s - gap_s, 0) / spread_s)
    other = gaps.longer_than(files.idle_s) + _PRIOR
    own_share = np.where(is_known, usual / (usual + other), 0)
    chance: FloatArray = own_share * of_own + (1 - own_share) * of_all
    return chance


def _index(gaps: Gaps) -> tuple[FloatArray, FloatArray]:
    """Of idle times: their logarithms, and those of their index."""
    counts, ends_s = gaps.counts + _PRIOR, Gaps.bounds_s()
    begins_s = np.concatenate(([0.0], ends_s[:-1]))
    # [begin, end]: those that come back within the buckets between, and the time that is waited for all
    is_between = np.triu(np.ones((NUM_BUCKETS, NUM_BUCKETS), np.bool_))
    comes = np.cumsum(np.where(is_between, counts, 0), axis=1)
    left = np.cumsum(counts[::-1])[::-1][:, None] - comes
    ends = ends_s - begins_s[:, None]
    waited = np.cumsum(np.where(is_between, counts * ends, 0), axis=1) + left * ends
    rates = np.where(is_between, comes / np.where(is_between, waited, 1), 0)
    return np.log(np.maximum(begins_s, ends_s[0] / 2)), np.log(rates.max(axis=1))
