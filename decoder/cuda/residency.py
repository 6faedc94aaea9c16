"""Which pages have a frame on the device: numbers alone, nothing moves here.

A *frame* is a place on the device that holds a page for now. A step or an assembly pins the frames of its pages. Of the
frames that are not pinned, the one that was used the longest ago goes to the next page that needs one. Pages are placed
all together or not at all: two users that each held some and waited for more could wait for each other for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decoder.batch import IntArray

_NONE = -1


@dataclass(frozen=True, slots=True)
class Placement:
    """What has to move so that some pages are on the device."""

    arrivals: IntArray
    """Pages that had no frame."""
    frames: IntArray
    """Theirs now."""
    evicted: IntArray
    """Pages that had some of these frames before."""
    evicted_frames: IntArray


class Residency:
    """The map between pages and frames."""

    def __init__(self, num_pages: int, num_frames: int) -> None:
        self.num_frames = num_frames
        self.frame_of = np.full(num_pages, _NONE, np.int32)
        self.page_of = np.full(num_frames, _NONE, np.int32)
        self.num_pins = np.zeros(num_frames, np.int32)
        self.num_writers = np.zeros(num_frames, np.int32)
        """Pins of those who write."""
        self._last_use = np.zeros(num_frames, np.int64)
        self._now = 0
        self._free: list[int] = list(range(num_frames - 1, -1, -1))

    @property
    def num_resident(self) -> int:
        return self.num_frames - len(self._free)

    def place(self, pages: IntArray, *, only_if_old: bool = False) -> Placement | None:
        """Give every one of `pages` (none twice) a frame; None: too many frames are pinned, and nothing changed.

        `only_if_old`: nor may a frame be taken from a page that the last use of others needed.
        """
        frames = self.frame_of.take(pages)
        arrivals = pages[frames < 0]
        num_evicted = max(0, len(arrivals) - len(self._free))
        evicted_frames = _NO_FRAMES
        if num_evicted:
            evictable = self.num_pins == 0
            evictable[frames[frames >= 0]] = False
            evictable[self._free] = False
            if only_if_old:
                evictable &= self._last_use < self._now
            candidates = np.flatnonzero(evictable)
            if len(candidates) < num_evicted:
                return None
            oldest = np.argsort(self._last_use[candidates], kind="stable")[:num_evicted]
            evicted_frames = candidates[oldest].astype(np.int32)
        evicted = self.page_of[evicted_frames]
        self.frame_of[evicted] = _NONE
        taken = [self._free.pop() for _ in range(len(arrivals) - num_evicted)]
        new_frames = np.concatenate((np.array(taken, np.int32), evicted_frames))
        self.frame_of[arrivals] = new_frames
        self.page_of[new_frames] = arrivals
        if not only_if_old:
            self._now += 2
        used = self.frame_of.take(pages).astype(np.intp)
        self._last_use[used] = self._now + only_if_old  # a hint is for the next use
        return Placement(arrivals, new_frames, evicted, evicted_frames)

    def drop(self, page: int) -> None:
        """A page's frame, if it has one, is free."""
        frame = int(self.frame_of[page])
        if frame >= 0:
            assert self.num_pins[frame] == 0, f"page {page} changes while frame {frame} is in use"
            self.frame_of[page] = self.page_of[frame] = _NONE
            self._last_use[frame] = 0
            self._free.append(frame)

    def check(self) -> None:
        """Raise AssertionError unless free and used frames are all frames, and the two maps agree."""
        used = np.flatnonzero(self.page_of >= 0)
        if sorted([*self._free, *used.tolist()]) != list(range(self.num_frames)):
            raise AssertionError(f"frames {used} are used, {self._free} are free, of {self.num_frames}")
        if not np.array_equal(self.frame_of[self.page_of[used]], used):
            raise AssertionError("pages and frames disagree")
        if np.count_nonzero(self.frame_of >= 0) != len(used):
            raise AssertionError("two pages have one frame")
        if (self.num_pins < self.num_writers).any() or (self.num_writers < 0).any():
            raise AssertionError(f"pins {self.num_pins}, of which writers {self.num_writers}")


_NO_FRAMES = np.empty(0, np.int32)
