"""Rank by idleness, as MORI does (arXiv 2606.00866): busy files stay, idle files are evicted.

A program has busy phases of short tool calls, and idle phases. Under LRU, one long call makes a busy program look idle
at once, and one short call makes an idle program look busy. Here the usual gap of a program counts. MORI uses the share
of time for which a program waits for tools. Uses take about equally long, so the gaps alone give the same order.
"""

from __future__ import annotations

import numpy as np

from kvfs.tiers.policy import Files, FloatArray, Gaps


def rank(files: Files, gaps: Gaps) -> FloatArray:  # noqa: ARG001 - the interface
    """Rank files by their usual gap, or by the present gap if that is already longer."""
    idleness: FloatArray = np.fmax(files.gap_s, files.idle_s)  # fmax ignores an unknown gap, which is NaN
    return -idleness
