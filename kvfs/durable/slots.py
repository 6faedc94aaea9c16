"""The slots of a slot file. A slot is owned, needed, both, or free.

*Owned*: a page in the daemon has the slot. *Needed*: a version in the index, or in a cut that is being committed,
refers to the slot. All other slots are free. A slot of a removed file is needed until a commit has removed the file's
rows, because a crash before that brings the file back.

The daemon's trio thread owns the slots.
"""

from __future__ import annotations

import errno

import numpy as np
import numpy.ma  # else the first np.unique would import this module, and hold the trio thread for 16 ms

from kvfs.pages.free_list import FreeList, IntArray
from libsym.errors import SymError

_FIRST_ROOM = 1024
_MANY = 256
"""If there are more arrays of freed slots than this, the arrays are merged."""


class Slots:
    """The slots of one file, by serial number. This class does not limit how many slots there are."""

    def __init__(self) -> None:
        self._owned = np.zeros(_FIRST_ROOM, np.bool_)
        self._needed = np.zeros(_FIRST_ROOM, np.int32)
        self._free = FreeList(_FIRST_ROOM)
        self.recorded: set[int] = set()
        """Slots whose row in the index describes their present content."""
        self.num_freed = 0
        """Number of slots that became free since the last `take_freed`."""
        self._freed: list[IntArray] = []

    @property
    def num_used(self) -> int:
        """Number of slots that are not free."""
        return self._free.num_pages - self._free.count

    def take(self, count: int) -> IntArray:
        """Take the `count` lowest free slots. The slots are owned from now on, and their rows in the index are out of
        date.
        """
        while self._free.count < count:
            self._grow(2 * self._owned.size)
        slots = self._free.take(count, lowest=True)
        self._owned[slots] = True
        self.recorded.difference_update(slots.tolist())
        return slots

    def restore(self, slots: IntArray, needed: IntArray) -> None:
        """Note the slots that the index has. Pages own all of them. `needed`: the number of versions that need each
        slot.
        """
        if slots.size:
            self._grow(int(slots.max()) + 1)
        self._owned[slots] = True
        self._needed[slots] = needed
        self._free.hold(slots)
        self.recorded.update(slots.tolist())

    def disown(self, slots: IntArray) -> None:
        """Note that pages have given up these slots."""
        self._owned[slots] = False
        self._give(slots)

    def need(self, slots: IntArray) -> None:
        """Note that each of these slots is needed by one more version."""
        np.add.at(self._needed, slots, 1)

    def need_no_more(self, slots: IntArray) -> None:
        """Note that each of these slots is needed by one version fewer."""
        np.subtract.at(self._needed, slots, 1)
        assert (self._needed[slots] >= 0).all()
        self._give(slots)

    def take_freed(self) -> IntArray:
        """Return the slots that became free since the last call, and are still free. Their blocks may be returned to
        the file system.
        """
        freed = np.unique(np.concatenate([_NONE, *self._freed]))
        self._freed.clear()
        self.num_freed = 0
        free: IntArray = freed[~self._owned[freed] & (self._needed[freed] == 0)]
        return free

    def end(self) -> int:
        """Return the number of the last slot that is not free, plus one. Workers may call this, too."""
        ends = (np.flatnonzero(each) for each in (self._owned, self._needed))  # the lengths differ while `_grow` runs
        return max((int(used[-1]) + 1 for used in ends if used.size), default=0)

    def hold(self, slots: IntArray) -> None:
        """Hold free slots while their blocks are returned to the file system, so that no page takes the slots
        meanwhile.
        """
        self._owned[slots] = True
        self._free.hold(slots)

    def hold_for_good(self, slots: IntArray) -> None:
        """Keep slots from ever becoming free, even if no page owns them and no version needs them."""
        self._grow(int(slots.max(initial=-1)) + 1)
        self._free.hold(slots)
        self.need(slots)

    def let_go(self, slots: IntArray) -> None:
        """Free the slots that `hold` held."""
        self._owned[slots] = False
        self._free.give(slots)

    def check(self) -> None:
        """Raise AssertionError unless the free slots are exactly those that are neither owned nor needed."""
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
