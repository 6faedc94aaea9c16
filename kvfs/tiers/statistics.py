"""Figures about the tiers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Counts of pages, unless stated otherwise: how full memory is, and moves since the daemon started."""

    num_frames: int
    num_free_frames: int
    num_computing: int
    """Pages that are pinned in memory because a call or job needs them."""
    num_kept: int
    """Pages that advice keeps in memory, including pages that are still being read."""
    num_on_disk_alone: int
    num_in: int
    num_out: int
    """Pages that were written for an eviction, or ahead of an eviction."""
    num_dropped: int
    """Pages that lost their frames."""
    num_waiting: int
    """Tickets that wait for frames."""
    num_waits: int
    """Calls that had to wait for pages."""
    wait_s: float
    """Seconds that tickets waited for pages, added up."""
    num_resumes: int
    """Files that were used again after evictions of their pages, and after a pause long enough to read the pages back.
    """
    num_hidden: int
    """Resumes that found all pages in memory again."""
    num_hints: int
    num_preempted: int
    """Calls that left the run so that other calls get memory."""
    bring_s: float
    """Recent average time to read a page, in seconds."""
    error: str
    """The error of the last write of pages. Empty: the write succeeded."""
