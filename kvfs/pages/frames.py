"""Memory frames and the pages in them: a page's number names 32 entries, and says nothing of where their bytes are.

A page that is being used has a frame of the store. One that was restored, or has gone down, has none until its bytes
are needed: they are on disk alone. So a pool may have more pages than frames.

Owned by the daemon's trio thread; workers use the pages that they hold references on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs.pages.columns import Columns, Numbers
from kvfs.pages.free_list import FreeList, IntArray
from kvfs.pages.store import PageStore

NOWHERE = -1
"""In place of a frame: the page is not in memory."""


class Frames:
    """The frames of one store, and the pages in them."""

    __slots__ = ("_columns", "_core", "bytes_in", "free", "generation", "of", "page_of", "store")

    def __init__(self, store: PageStore, columns: Columns, core: Any) -> None:
        """`core`: the pool's `core_pool`, which learns of frames here."""
        self.store, self._core = store, core
        self._columns = of_frames = Columns("frame_columns", store.num_pages, store.num_pages)
        of_frames.tell(core.frame)
        self.of: Numbers = columns["frame"]
        """The frame of each page, or NOWHERE."""
        self.page_of: Numbers = of_frames["page"]
        """The page in each frame, or NOWHERE."""
        self.generation: npt.NDArray[np.int64] = of_frames["generation"]
        self.bytes_in: npt.NDArray[np.int64] = of_frames["bytes_in"]
        """The pool writes owners' marks here."""
        self.free = FreeList(store.num_pages)
        """Frames that are taken from here get pages by `bind`, or come back."""
        core.frames = self.free.core

    def bind(self, pages: IntArray, frames: IntArray) -> None:
        """Give frames to pages: the pages are in memory from now on."""
        self.of[pages] = frames
        self.page_of[frames] = pages

    def held_pages(self) -> IntArray:
        """Every page that is in memory: looks at the frames that were ever used."""
        used = self.page_of[: self.free.top]
        pages: IntArray = used[used != NOWHERE]
        return pages

    # As of `PageStore`, for pages that are in memory

    def view(self, page: int, count: int = 1) -> memoryview:
        """The bytes of a page, and of those in the frames behind it."""
        return self.store.view(self._frame(page), count)

    def writable(self, page: int) -> memoryview:
        """The bytes of a page that nobody else knows, to be overwritten whole."""
        return self.store.writable(self._frame(page))

    def zero(self, page: int) -> None:
        """Fill a page with zeros."""
        self.store.zero(self._frame(page))

    def assemble(self, target: int, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        """Fill a page with slots of other pages."""
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

    # The books

    def check(self, num_pages: int) -> None:
        """Raise AssertionError unless each frame is free, bound to one page, or about to be bound.

        `num_pages`: the others were never used.
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
