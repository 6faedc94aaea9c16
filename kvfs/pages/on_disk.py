"""Where pages are on disk: the slot of each, and how much of the page that slot holds.

A slot is written once, and read until the last file that needs it is forgotten. So a page's slot holds its first `kept`
entries for good, and whatever the page gets behind them is not on disk. A table that was cut may go on in place
in a page that it has alone: entries that it overwrites lower `kept`. The next write of the page takes another slot.

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
    """The files that slots are in."""

    def disown(self, pages: IntArray, slots: IntArray) -> None:
        """The pages had these slots until now; no page has them any more."""
        ...


class NoSlotFiles:
    """A disk without pages."""

    def disown(self, pages: IntArray, slots: IntArray) -> None:
        """Slots are numbers here."""


class OnDisk:
    """The slots of a pool's pages."""

    __slots__ = ("_files", "_num_suspect", "_stable", "check", "generation", "is_suspect", "kept", "slot")

    def __init__(self, columns: Columns, files: Callable[[], SlotFiles] = NoSlotFiles) -> None:
        """`files` returns those that slots are in, once they are open."""
        self._files = files
        self.slot: Numbers = columns["slot"]
        """Of each page, or NO_SLOT."""
        self.check: npt.NDArray[np.uint64] = columns["checksum"]
        self.kept: npt.NDArray[np.int8] = columns["num_on_disk"]
        self.is_suspect: npt.NDArray[np.bool_] = columns["is_suspect"]
        self._num_suspect = 0  # some were
        self._stable: npt.NDArray[np.int8] = columns["num_written"]
        self.generation: IntArray = columns["generation"]
        """Equal ones mean that a number was not given back meanwhile."""

    def left(self, owners: npt.NDArray[np.void]) -> None:
        """Tell the files of pages that had slots until their numbers were given back: see `core_left`."""
        if owners.size:
            self._files().disown(owners["page"], owners["slot"])

    def begin_write(self, pages: IntArray, fills: npt.NDArray[np.int8]) -> IntArray:
        """Pages are being written, so many entries of each; give what this returns to `end_write`."""
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
        """Give pages the slots that are written now, and return which have got them: others were given back meanwhile.

        A full page is summed and written where it lies, without a copy. One that was cut and overwritten meanwhile may
        have been summed before that, and written after it: its slot is of no use.
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
        """Tell which of the pages are on disk with so many entries each."""
        is_kept: npt.NDArray[np.bool_] = (self.kept[pages] >= fills) & ~self.is_suspect[pages]
        return is_kept

    def restore(
        self, pages: IntArray, slots: IntArray, checks: npt.NDArray[np.uint64], kept: npt.NDArray[np.int8]
    ) -> None:
        """Give pages what they had when the daemon before ended."""
        self.slot[pages], self.check[pages], self.kept[pages] = slots, checks, kept

    def spoil(self, pages: IntArray, is_in_memory: npt.NDArray[np.bool_]) -> None:
        """Have pages written anew: bytes of their slots may be gone after a power cut.

        Pages that are nowhere else are read from there meanwhile. A number without a slot is another page's by now.
        """
        has_slot = self.slot.has(pages)
        pages, is_in_memory = pages[has_slot], is_in_memory[has_slot]
        self.kept[pages[is_in_memory]] = 0
        self.is_suspect[pages[~is_in_memory]] = True
        self._num_suspect += int(np.count_nonzero(~is_in_memory))

    def strange(self, unused: Mask, is_own: Mask) -> Mask:
        """Tell which of the first pages contradict themselves here. `is_own`: of the running model, in one file."""
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
        """Return facts of pages for a message of the audit."""
        return f"slot {self.slot[pages]} with {self.kept[pages]}, suspect {self.is_suspect[pages]}"

    def durable_length(self, pages: IntArray, length: int) -> int:
        """Count a table's first entries that are on disk."""
        of_each = self.kept[pages]
        if self._num_suspect:
            of_each[self.is_suspect[pages]] = 0
        kept = of_each.tobytes()
        rest = kept.lstrip(bytes((PAGE_ENTRIES,)))  # 4 µs: a comparison in numpy takes 12
        return min(length, (len(kept) - len(rest)) * PAGE_ENTRIES + (rest[0] if rest else 0))
