"""Memory frames and the pages in them. A page number names 32 entries, wherever their bytes are.

A page that is in use has a frame of the store. A page that was restored or evicted is on disk alone, and has no frame
until its bytes are needed. So a pool may have more pages than frames.

Owned by the daemon's trio thread. Workers use the pages that they hold references on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs.pages.columns import Columns, Numbers
from kvfs.pages.free_list import FreeList, IntArray
from kvfs.pages.store import PageStore

NOWHERE = -1
"""Stands for the frame of a page that is not in memory."""


class Frames:
    """The frames of one store, and the pages in them."""

    __slots__ = ("_columns", "_core", "bytes_in", "free", "generation", "of", "page_of", "store")

    def __init__(self, store: PageStore, columns: Columns, core: Any) -> None:
        """`core` is the pool's `core_pool`: the frames and their columns are registered in it."""
        self.store, self._core = store, core
        self._columns = of_frames = Columns("frame_columns", store.num_pages, store.num_pages)
        of_frames.tell(core.frame)
        self.of: Numbers = columns["frame"]
        """The frame of each page, or NOWHERE."""
        self.page_of: Numbers = of_frames["page"]
        """The page in each frame, or NOWHERE."""
        self.generation: npt.NDArray[np.int64] = of_frames["generation"]
        self.bytes_in: npt.NDArray[np.int64] = of_frames["bytes_in"]
        """Marks of the bytes' owners, which the pool writes."""
        self.free = FreeList(store.num_pages)
        """Free frames. The caller binds frames that it takes from here to pages, or gives them back."""
        core.frames = self.free.core

    def bind(self, pages: IntArray, frames: IntArray) -> None:
        """Give frames to pages. The pages are in memory from then on."""
        self.of[pages] = frames
        self.page_of[frames] = pages

    def held_pages(self) -> IntArray:
        """Return every page that is in memory. Only frames that were ever used are examined."""
        used = self.page_of[: self.free.top]
        pages: IntArray = used[used != NOWHERE]
        return pages

    # The interface of `PageStore`, for pages that are in memory

    def view(self, page: int, count: int = 1) -> memoryview:
        """Return the bytes of a page, and of the pages in the `count - 1` frames behind it."""
        return self.store.view(self._frame(page), count)

    def writable(self, page: int) -> memoryview:
        """Return the bytes of a page that no other code knows. The caller overwrites all of them."""
        return self.store.writable(self._frame(page))

    def zero(self, page: int) -> None:
        """Fill a page with zeros."""
        self.store.zero(self._frame(page))

    def assemble(self, target: int, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        """Fill a page with entries of other pages."""
        self.store.assemble(self._frame(target), self.frames_of(sources), slots, shifts)

    def frames_of(self, pages: IntArray) -> IntArray:
        """Return the frames of pages, which all have to be in memory."""
        frames: IntArray = self.of[pages]
        assert np.minimum.reduce(frames, initial=0) == 0, f"pages {pages[frames < 0]} are not in memory"
        return frames

    def _frame(self, page: int) -> int:
        frame = int(self.of[page])
        assert frame != NOWHERE, f"page {page} is not in memory"
        return frame

    # The audit

    def check(self, num_pages: int) -> None:
        """Raise AssertionError unless each frame is free, bound to one page, or about to be bound.

        Pages from `num_pages` on were never used.
        """
        self.free.check()
        bound = self.of[:num_pages][self.of[:num_pages] != NOWHERE]
        is_free = self.free.bitmap(self.free.top)
        holding = np.flatnonzero(self.page_of[: self.free.top] != NOWHERE)
        if holding.size != bound.size or (self.of[self.page_of[holding]] != holding).any():
            raise AssertionError("a page and its frame disagree about each other")
        if np.unique(bound).size != bound.size or is_free[bound].any():
            raise AssertionError("a frame is bound to two pages, or is free although it holds one")
        num_coming = self._core.num_coming
        if bound.size + self.free.count + num_coming != self.store.num_pages:
            raise AssertionError(
                f"{bound.size} frames bound + {self.free.count} free + {num_coming} coming != {self.store.num_pages}"
            )
