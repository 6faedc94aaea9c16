"""Pins that end by themselves: each lease has an alarm, which unpins the file.

They are not kept: the daemon that is started next knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvfs.alarms import Alarm, Alarms
from kvfs.names.inode import Inode


class Leases:
    """The alarms of one tree's files, by inode number."""

    def __init__(self, alarms: Alarms, end: Callable[[Inode], None]) -> None:
        """`end` is called of each file whose lease is over."""
        self._alarms = alarms
        self._end = end
        self._of: dict[int, Alarm] = {}

    def note(self, inode: Inode) -> None:
        """A file's advice has changed."""
        self.forget(inode)
        if inode.advice.lease_end_s is not None:
            self._of[inode.number] = self._alarms.set(inode.advice.left_s(), partial(self._over, inode))

    def forget(self, inode: Inode) -> None:
        """Nothing leads to the file any more, or it is pinned no longer."""
        alarm = self._of.pop(inode.number, None)
        if alarm is not None:
            self._alarms.cancel(alarm)

    def _over(self, inode: Inode) -> None:
        del self._of[inode.number]
        self._end(inode)
