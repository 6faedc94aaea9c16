"""`PageStore`: the memory behind the pool, which the decoder's arenas satisfy by structure."""

from __future__ import annotations

from typing import Protocol

from kvfs.pages.free_list import IntArray


class PageStore(Protocol):
    """Pages of KV by number: `num_pages` blobs of `page_bytes` each, laid out one after the other."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    def view(self, page: int, count: int = 1) -> memoryview:
        """The bytes of `count` consecutive pages as they are now, to be read, without a copy.

        Bytes below the end of a page's table stay good as long as somebody refers to the page.
        """
        ...

    def writable(self, page: int) -> memoryview:
        """The bytes of one page that nobody else knows, to be overwritten whole."""
        ...

    def zero(self, page: int) -> None:
        """Fill one page with zeros."""
        ...

    def masked(self, data: memoryview, num_entries: int) -> bytes:
        """A copy of a page's bytes, which need not be in the store, in which slots from `num_entries` on are zero."""
        ...

    def assemble(self, target: int, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        """Fill a page: its slot i becomes slot `slots[i]` of page `sources[i]`, moved up by `shifts[i]` positions.

        Slots past the last read as zero. For worker threads: no other page changes.
        """
        ...
