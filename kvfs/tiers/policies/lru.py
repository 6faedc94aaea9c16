"""Least recently used: the file that has been idle longest is evicted first. This is a baseline for comparisons."""

from __future__ import annotations

from kvfs.tiers.policy import Files, FloatArray, Gaps


def rank(files: Files, gaps: Gaps) -> FloatArray:  # noqa: ARG001 - the interface
    return -files.idle_s
