"""Reads pages that may lose their frames at any time. For worker threads that hold references on them.

A reference keeps a page's entries, not its place: the page may go to disk while a worker reads it, and its frame may
hold another page a moment later. To pin what is only read would keep others from their room for as long as an image is
hashed or copied; to ask the trio thread for each page would be slow. So a worker looks without asking, and then looks
again: a frame has a generation, which grows whenever it stops holding its page. If the page is in the same frame, of
the same generation, what was read is the page's. Else it is thrown away and read again, from its slot by now.

Nothing comes into memory by this: a page that is on disk alone is used where it is read to.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from kvfs.pages.frames import NOWHERE, Frames
from kvfs.pages.free_list import IntArray
from libsym.errors import SymError

MOST_IN_VAIN, IN_VAIN_S = 1000, 1e-3
"""A page is on its way for a moment; what is neither here nor there for longer was given back."""

T = TypeVar("T")
Bytes: TypeAlias = bytes | memoryview


class ColdPages(Protocol):
    """Reads pages that are on disk alone. For worker threads."""

    def use(self, pages: IntArray, what: Callable[[list[Bytes]], Sequence[T]]) -> Sequence[T | None]:
        """Return what a function makes of their bytes, which are verified, and good during that call; EIO: damaged.

        None for a page that came into memory, or has another slot, since it was looked for.
        """
        ...

    def head(self, page: int, data: Bytes, num_entries: int) -> bytes:
        """A copy of a page's bytes in which every slot from `num_entries` on reads as zero."""
        ...


class NoColdPages:
    """Every page is in memory."""

    def __init__(self, store: Frames) -> None:
        self._store = store

    def use(self, pages: IntArray, what: Callable[[list[Bytes]], Sequence[T]]) -> Sequence[T | None]:
        """Fail: nobody has such a page."""
        raise AssertionError(f"pages {pages} are nowhere, for {what}")

    def head(self, page: int, data: Bytes, num_entries: int) -> bytes:
        """A copy of a page's bytes in which every slot from `num_entries` on reads as zero."""
        assert page >= 0
        return self._store.store.masked(memoryview(data), num_entries)


def look(store: Frames, cold: ColdPages, pages: IntArray, what: Callable[[list[Bytes]], Sequence[T]]) -> list[T]:
    """Return what a function makes of pages, one result for each; it may be called with some of them, and again."""
    found: dict[int, T] = {}
    left, num_in_vain = list(range(len(pages))), 0
    while left:
        # In this order: a frame whose page went between the two has its new generation, and the page is not there.
        frames = store.of[pages[left]]
        generations = store.generation[frames]
        here = [number for number, frame in enumerate(frames.tolist()) if frame != NOWHERE]
        away = [number for number, frame in enumerate(frames.tolist()) if frame == NOWHERE]
        if here:
            results = what([store.store.view(frame) for frame in frames[here].tolist()])
            is_same = store.of[pages[left]] == frames
            is_same &= store.generation[frames] == generations
            found |= {left[number]: each for number, each in zip(here, results, strict=True) if is_same[number]}
        if away:
            from_disk = zip(away, cold.use(pages[left][away], what), strict=True)
            found |= {left[number]: each for number, each in from_disk if each is not None}
        still_left = [number for number in left if number not in found]
        num_in_vain = num_in_vain + 1 if len(still_left) == len(left) else 0
        if num_in_vain > MOST_IN_VAIN:
            raise SymError("pages were given back while they were read", errno.EIO)
        if num_in_vain:
            time.sleep(IN_VAIN_S)
        left = still_left
    return [found[number] for number in range(len(pages))]


def copies(views: list[Bytes]) -> list[bytes]:
    """For `look`: the bytes themselves."""
    return [bytes(view) for view in views]
