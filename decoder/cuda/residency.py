"""Residency: the map of pages to device frames. The map holds numbers, and moves no bytes.

A *device frame*, a `frame` in this package, is a place on the device that holds a page for now. A step or an assembly
pins the frames of its pages. A page that needs a frame evicts the least recently used page that is not pinned. Pages
are placed all together or not at all. Otherwise, a step and an assembly could each hold some frames, and wait for each
other for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decoder.batch import IntArray

_NONE = -1


@dataclass(frozen=True, slots=True)
class Placement:
    """Moves that bring a set of pages onto the device."""

    arrivals: IntArray
    """Pages that had no frame."""
    frames: IntArray
    """Frames that the arrivals get."""
    evicted: IntArray
    """Pages that held some of these frames before."""
    evicted_frames: IntArray


class Residency:
    """The map between pages and frames, with the pins of frames."""

    def __init__(self, num_pages: int, num_frames: int) -> None:
        self.num_frames = num_frames
        self.frame_of = np.full(num_pages, _NONE, np.int32)
        self.page_of = np.full(num_frames, _NONE, np.int32)
        self.num_pins = np.zeros(num_frames, np.int32)
        self.num_writers = np.zeros(num_frames, np.int32)
        """Number of pins by steps and assemblies that write the frame."""
        self._last_use = np.zeros(num_frames, np.int64)
        self._now = 0
        self._free: list[int] = list(range(num_frames - 1, -1, -1))

    @property
    def num_resident(self) -> int:
        return self.num_frames - len(self._free)

    def place(self, pages: IntArray, *, only_if_old: bool = False) -> Placement | None:
        """Give each of the distinct `pages` a frame. None: too many frames are pinned, and nothing changed.

        `only_if_old` is for hints: pages of the last use and of later hints keep their frames, too.
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
        self._last_use[used] = self._now + only_if_old  # a hint counts as the next use
        return Placement(arrivals, new_frames, evicted, evicted_frames)

    def drop(self, page: int) -> None:
        """Free a page's frame, if it has one."""
        frame = int(self.frame_of[page])
        if frame >= 0:
            assert self.num_pins[frame] == 0, f"page {page} changes while frame {frame} is in use"
            self.frame_of[page] = self.page_of[frame] = _NONE
            self._last_use[frame] = 0
            self._free.append(frame)

    def check(self) -> None:
        """Raise AssertionError if the two maps disagree, or if a frame is both free and used, or neither."""
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
