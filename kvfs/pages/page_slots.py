"""The slot of each page on disk, and how many of the page's entries the slot holds.

The columns of the pool have these facts. The pool takes no frame from a page without a slot. `kvfs.durable` has the
files of slots.

A slot is written once, and read until the last file that needs it is forgotten. So a slot holds the page's first `kept`
entries for good, and entries that the page gets later are not on disk. A table that was truncated may append in place
in a page that no other table refers to. Then `kept` is lowered to the entries that are not overwritten. The next write
of the page takes another slot.

Owned by the daemon's trio thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvfs.pages.columns import Columns, Numbers
from kvfs.pages.free_list import IntArray
from libsym.abi import PAGE_ENTRIES

NO_SLOT = -1

Mask: TypeAlias = npt.NDArray[np.bool_]


class SlotFiles(Protocol):
    """The files that contain slots."""

    def disown(self, pages: IntArray, slots: IntArray) -> None:
        """Note that pages no longer have these slots."""
        ...


class NoSlotFiles:
    """Files of slots for a pool that writes no page to disk."""

    def disown(self, pages: IntArray, slots: IntArray) -> None:
        """Do nothing: without a disk, slots are only numbers."""


class PageSlots:
    """The slots of a pool's pages."""

    __slots__ = ("_files", "_num_suspect", "_stable", "check", "generation", "is_suspect", "kept", "slot")

    def __init__(self, columns: Columns, files: Callable[[], SlotFiles] = NoSlotFiles) -> None:
        """`files` returns the files of slots, once they are open."""
        self._files = files
        self.slot: Numbers = columns["slot"]
        """Slot of each page, or NO_SLOT."""
        self.check: npt.NDArray[np.uint64] = columns["checksum"]
        self.kept: npt.NDArray[np.int8] = columns["num_on_disk"]
        self.is_suspect: npt.NDArray[np.bool_] = columns["is_suspect"]
        self._num_suspect = 0  # 0: no page was ever suspect
        self._stable: npt.NDArray[np.int8] = columns["num_written"]
        self.generation: IntArray = columns["generation"]
        """How often each page number was freed. If two readings are equal, the number was not freed in between."""

    def left(self, owners: npt.NDArray[np.void]) -> None:
        """Tell the files of slots which of the freed pages had slots: see `core_left`."""
        if owners.size:
            self._files().disown(owners["page"], owners["slot"])

    def begin_write(self, pages: IntArray, fills: npt.NDArray[np.int8]) -> IntArray:
        """Note that a write of pages begins. `fills` has the number of entries to write from each page. The caller
        passes the result on to `end_write`.
        """
        self._stable[pages] = fills
        return self.generation[pages]

    def end_write(
        self,
        pages: IntArray,
        generations: IntArray,
        fills: npt.NDArray[np.int8],
        slots: IntArray,
        checks: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.bool_]:
        """Give written pages their slots, and return which pages got a slot. A page that was freed meanwhile gets no
        slot.

        A full page is summed and written from its frame, without a copy. If the page is truncated and overwritten
        meanwhile, the sum may not match the bytes that were written. Then the slot is useless.
        """
        is_whole = (fills < PAGE_ENTRIES) | (self._stable[pages] == PAGE_ENTRIES)
        is_same: npt.NDArray[np.bool_] = (self.generation[pages] == generations) & is_whole
        same = pages[is_same]
        owners = np.unique(same[self.slot.has(same)])
        if owners.size:
            self._files().disown(owners, self.slot[owners])
        self.slot[same] = slots[is_same]
        self.check[same] = checks[is_same]
        self.kept[same] = self._stable[same]
        self.is_suspect[same] = False
        return is_same

    def is_kept(self, pages: IntArray, fills: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
        """Return for each page whether its first `fills` entries are on disk."""
        is_kept: npt.NDArray[np.bool_] = (self.kept[pages] >= fills) & ~self.is_suspect[pages]
        return is_kept

    def restore(
        self, pages: IntArray, slots: IntArray, checks: npt.NDArray[np.uint64], kept: npt.NDArray[np.int8]
    ) -> None:
        """Give pages the slots that they had when the previous daemon ended."""
        self.slot[pages], self.check[pages], self.kept[pages] = slots, checks, kept

    def spoil(self, pages: IntArray, is_in_memory: npt.NDArray[np.bool_]) -> None:
        """Mark pages for a write to new slots, because a power cut may have destroyed the bytes of their present slots.

        Pages that are not in memory are read from these slots in the meantime. Page numbers without a slot are skipped:
        these numbers belong to other pages by now.
        """
        has_slot = self.slot.has(pages)
        pages, is_in_memory = pages[has_slot], is_in_memory[has_slot]
        self.kept[pages[is_in_memory]] = 0
        self.is_suspect[pages[~is_in_memory]] = True
        self._num_suspect += int(np.count_nonzero(~is_in_memory))

    def strange(self, unused: Mask, is_own: Mask) -> Mask:
        """Return which of the first pages have columns that contradict each other. `is_own` is true for pages of the
        running model.
        """
        num = unused.size
        slots, kept, is_suspect = self.slot[:num], self.kept[:num], self.is_suspect[:num]
        has_slot = slots != NO_SLOT
        in_file = has_slot & is_own
        num_pages = np.bincount(slots[in_file])
        found: Mask = (kept < 0) | (kept > PAGE_ENTRIES) | (~has_slot & ((kept != 0) | is_suspect))
        found |= unused & (has_slot | (self._stable[:num] != 0))
        found[in_file] |= num_pages[slots[in_file]] > 1
        return found

    def facts(self, pages: npt.NDArray[np.integer]) -> str:
        """Describe pages, for a message of the audit."""
        return f"slot {self.slot[pages]} with {self.kept[pages]}, suspect {self.is_suspect[pages]}"

    def durable_length(self, pages: IntArray, length: int) -> int:
        """Return how many of a table's first entries are on disk."""
        of_each = self.kept[pages]
        if self._num_suspect:
            of_each[self.is_suspect[pages]] = 0
        kept = of_each.tobytes()
        rest = kept.lstrip(bytes((PAGE_ENTRIES,)))  # 4 µs: a comparison in numpy takes 12
        return min(length, (len(kept) - len(rest)) * PAGE_ENTRIES + (rest[0] if rest else 0))
