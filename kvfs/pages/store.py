"""`PageStore`: the memory behind the pool. The decoder's arenas satisfy this protocol by structure."""

from __future__ import annotations

from typing import Protocol

from kvfs.pages.free_list import IntArray


class PageStore(Protocol):
    """KV pages by number: `num_pages` consecutive blobs of `page_bytes` each."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    def view(self, page: int, count: int = 1) -> memoryview:
        """Return the bytes of `count` consecutive pages, read-only and without a copy.

        Bytes of committed entries stay valid while a reference on the page exists.
        """
        ...

    def writable(self, page: int) -> memoryview:
        """Return the bytes of a page that no other code knows. The caller overwrites all of them."""
        ...

    def zero(self, page: int) -> None:
        """Fill one page with zeros."""
        ...

    def masked(self, data: memoryview, num_entries: int) -> bytes:
        """Return a copy of a page's bytes with zeros in all entries from `num_entries` on, for any page."""
        ...

    def assemble(self, target: int, sources: IntArray, slots: IntArray, shifts: IntArray) -> None:
        """Fill a page: copy entry `slots[i]` of page `sources[i]` to entry i, moved up by `shifts[i]` positions.

        The target is no source. The entries behind these become zeros. Worker threads may call this, because no other
        page changes.
        """
        ...
