"""Figures that say how the tiers are doing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Numbers of pages, unless said otherwise: how full memory is, and what has moved since the daemon started."""

    num_frames: int
    num_free_frames: int
    num_computing: int
    """Needed where they are now."""
    num_kept: int
    """Pages that advice keeps in memory, those on their way there included."""
    num_on_disk_alone: int
    num_in: int
    num_out: int
    """Written to make room, or ahead of that."""
    num_dropped: int
    """Pages that lost their frame."""
    num_waiting: int
    """Calls."""
    num_waits: int
    """Calls that had to wait for pages."""
    wait_s: float
    """Seconds that tickets waited for pages, added up."""
    num_resumes: int
    """Files that were used again after pages of theirs went down, and a pause long enough to bring them back."""
    num_hidden: int
    """Resumes whose pages were all back before the call."""
    num_hints: int
    num_preempted: int
    """Calls that left the run for the sake of others' pages."""
    bring_s: float
    """Seconds that reading a page takes, lately."""
    error: str
    """Why the last page could not be moved; empty since one was."""
