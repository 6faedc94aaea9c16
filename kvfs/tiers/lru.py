"""Least recently used: what lies idle longest goes first. What most caches do, to be compared with."""

from __future__ import annotations

from kvfs.tiers.policy import Files, FloatArray, Gaps


def rank(files: Files, gaps: Gaps) -> FloatArray:  # noqa: ARG001 - the interface
    return -files.idle_s
