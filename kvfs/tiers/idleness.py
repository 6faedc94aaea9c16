"""Rank by idleness: the busiest files stay, the most idle ones go, as MORI does it (arXiv 2606.00866).

A program has busy phases of short tool calls, and idle ones. One long call does not make a busy program an idle one at
once, as it does for LRU, nor one short call an idle program a busy one: what counts is what its gaps usually are. MORI
takes the share of time that a program waits for tools. Uses take about equally long, so the gaps alone give that order.
"""

from __future__ import annotations

import numpy as np

from kvfs.tiers.policy import Files, FloatArray, Gaps


def rank(files: Files, gaps: Gaps) -> FloatArray:  # noqa: ARG001 - the interface
    """A gap that goes on longer than is usual counts as it is."""
    idleness: FloatArray = np.fmax(files.gap_s, files.idle_s)  # an unknown gap is not a number: fmax takes the other
    return -idleness
