"""The free slots of a file. A slot is kept while a page has it, or a file that the index knows needs it.

*Owned*: a page in the daemon has the slot. *Needed*: a version in the index refers to it, or one in a cut that is being
committed. A slot that is neither is free: not before the commit that forgets it, for until then a crash brings the file
back.

Owned by the daemon's trio thread.
"""

from __future__ import annotations

import errno

import numpy as np
import numpy.ma  # np.unique imports it when it is first called: that would hold the trio thread for 16 ms

from kvfs.pages.free_list import FreeList, IntArray
from libsym.errors import SymError

_FIRST_ROOM = 1024
_MANY = 256
"""Pieces of what became free are put together when there are more."""


class Slots:
    """The slots of one file, by number; there are always more, up to `limit` bytes of the whole state."""

    def __init__(self) -> None:
        self._owned = np.zeros(_FIRST_ROOM, np.bool_)
        self._needed = np.zeros(_FIRST_ROOM, np.int32)
        self._free = FreeList(_FIRST_ROOM)
        self.recorded: set[int] = set()
        """Slots whose row in the index says what is in them."""
        self.num_freed = 0
        """Slots that became free since `take_freed`."""
        self._freed: list[IntArray] = []

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self._free.num_pages - self._free.count

    def take(self, count: int) -> IntArray:
        """Take the `count` lowest free slots: they are owned from now on, and what the index says of them is old."""
        while self._free.count < count:
            self._grow(2 * self._owned.size)
        slots = self._free.take(count, lowest=True)
        self._owned[slots] = True
        self.recorded.difference_update(slots.tolist())
        return slots

    def restore(self, slots: IntArray, needed: IntArray) -> None:
        """Slots that the index knows, each needed by so many versions; pages own them."""
        if slots.size:
            self._grow(int(slots.max()) + 1)
        self._owned[slots] = True
        self._needed[slots] = needed
        self._free.hold(slots)
        self.recorded.update(slots.tolist())

    def disown(self, slots: IntArray) -> None:
        """No page has them any more."""
        self._owned[slots] = False
        self._give(slots)

    def need(self, slots: IntArray) -> None:
        """Note that a version more needs each slot."""
        np.add.at(self._needed, slots, 1)

    def need_no_more(self, slots: IntArray) -> None:
        """Note that a version less needs each slot."""
        np.subtract.at(self._needed, slots, 1)
        assert (self._needed[slots] >= 0).all()
        self._give(slots)

    def take_freed(self) -> IntArray:
        """Slots that became free since this was asked last, and still are: their blocks may go back."""
        freed = np.unique(np.concatenate([_NONE, *self._freed]))
        self._freed.clear()
        self.num_freed = 0
        free: IntArray = freed[~self._owned[freed] & (self._needed[freed] == 0)]
        return free

    def end(self) -> int:
        """The slot behind the last one that is not free. Workers may ask, too."""
        ends = (np.flatnonzero(each) for each in (self._owned, self._needed))  # of two lengths, while there come more
        return max((int(used[-1]) + 1 for used in ends if used.size), default=0)

    def hold(self, slots: IntArray) -> None:
        """Free slots whose blocks are being given back: not to be taken meanwhile."""
        self._owned[slots] = True
        self._free.hold(slots)

    def hold_for_good(self, slots: IntArray) -> None:
        """Keep slots from ever being free, whoever owns or needs them."""
        self._grow(int(slots.max(initial=-1)) + 1)
        self._free.hold(slots)
        self.need(slots)

    def let_go(self, slots: IntArray) -> None:
        """Free the slots that were held."""
        self._owned[slots] = False
        self._free.give(slots)

    def check(self) -> None:
        """Raise AssertionError unless the free slots are those that nobody owns or needs."""
        self._free.check()
        top = self._free.top
        if (self._free.bitmap(top) != (~self._owned[:top] & (self._needed[:top] == 0))).any():
            raise AssertionError("a slot is free although a page or a version has it, or is not although none has")

    def _give(self, slots: IntArray) -> None:
        free = np.unique(slots[~self._owned[slots] & (self._needed[slots] == 0)])
        if free.size:
            self._free.give(free)
            self.num_freed += int(free.size)
            self._freed.append(free)
            if len(self._freed) > _MANY:
                self._freed = [np.unique(np.concatenate(self._freed))]

    def _grow(self, size: int) -> None:
        more = size - self._owned.size
        if more > 0:
            self._free.grow(size)
            self._owned = np.concatenate([self._owned, np.zeros(more, np.bool_)])
            self._needed = np.concatenate([self._needed, np.zeros(more, np.int32)])


def full(what: str) -> SymError:
    return SymError(what, errno.ENOSPC)


_NONE = np.empty(0, np.int32)
