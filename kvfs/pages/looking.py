"""Reads pages that may lose their frames at any time. The readers are worker threads that hold references on the pages.

A reference keeps a page's entries, but not its frame. The page may be evicted while a worker reads it, and the frame
may hold another page a moment later. A pin would hold the memory for as long as an image is hashed or copied. Asking
the trio thread about each page would be slow. So a worker reads optimistically, and checks afterwards. Each frame has a
generation, which grows when the frame stops holding its page. If the page is still in the same frame, with the same
generation, the worker has read the page's bytes. Otherwise the worker discards the bytes, and reads the page again,
from disk.

These reads load nothing into memory: a page on disk is used in the buffer that it is read to.
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
"""Number of attempts that may fail in a row, and the pause after each. A page that moves is outside memory and disk
only for a moment. So if all these attempts fail, the page was freed.
"""

T = TypeVar("T")
Bytes: TypeAlias = bytes | memoryview


class ColdPages(Protocol):
    """Reader of pages that are on disk alone. Worker threads use the reader."""

    def use(self, pages: IntArray, what: Callable[[list[Bytes]], Sequence[T]]) -> Sequence[T | None]:
        """Call `what` with the bytes of pages, and return its results. EIO: a page is damaged.

        The bytes are verified, and valid only during the call. The result is None for a page that came into memory, or
        got another slot, in the meantime.
        """
        ...

    def head(self, page: int, data: Bytes, num_entries: int) -> bytes:
        """Return a copy of a page's bytes with zeros in every entry from `num_entries` on."""
        ...


class NoColdPages:
    """A reader for pools whose pages are all in memory."""

    def __init__(self, store: Frames) -> None:
        self._store = store

    def use(self, pages: IntArray, what: Callable[[list[Bytes]], Sequence[T]]) -> Sequence[T | None]:
        """Fail: no page is on disk."""
        raise AssertionError(f"pages {pages} are nowhere, for {what}")

    def head(self, page: int, data: Bytes, num_entries: int) -> bytes:
        """Return a copy of a page's bytes with zeros in every entry from `num_entries` on."""
        assert page >= 0
        return self._store.store.masked(memoryview(data), num_entries)


def look(store: Frames, cold: ColdPages, pages: IntArray, what: Callable[[list[Bytes]], Sequence[T]]) -> list[T]:
    """Call `what` with the bytes of pages, and return a result for each page.

    A call of `what` may get only some of the pages, and `what` may get a page twice.
    """
    found: dict[int, T] = {}
    left, num_in_vain = list(range(len(pages))), 0
    while left:
        # The order of these two reads matters. If a page loses its frame between them, the generation is new, and the
        # check below fails.
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
    """Copy the bytes of each view: a function for `look`."""
    return [bytes(view) for view in views]
