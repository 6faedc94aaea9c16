"""How the tiers are doing, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """How full memory is, and what has moved since the daemon started. In pages, unless it says otherwise."""

    num_frames: int
    num_free_frames: int
    num_computing: int
    """Needed where they are now."""
    num_kept: int
    """That advice keeps in memory, those on their way there included."""
    num_on_disk_alone: int
    num_in: int
    num_out: int
    """Written to make room, or ahead of that."""
    num_dropped: int
    """That lost their frame."""
    num_waiting: int
    """Calls."""
    num_waits: int
    """Calls that had to wait for pages."""
    wait_s: float
    """How long they did, together."""
    num_resumes: int
    """Files that were used again after pages of theirs went down, and a pause long enough to bring them back."""
    num_hidden: int
    """Those of them whose pages were all back before the call."""
    num_hints: int
    num_preempted: int
    """Calls that left the run for the sake of others' pages."""
    bring_s: float
    """What reading a page takes."""
    error: str
    """Why the last page could not be moved; empty since one was."""
