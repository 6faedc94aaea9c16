"""Files with a TTL that nobody has open: each has an alarm, which takes away all of its names.

To use a file is to have it open (a handle of a LIP, an open file of the mount), so its last use is the last close.
Setting advice counts as one. An open file has no need of an alarm, and pays nothing: one that goes off meanwhile does
nothing, and the close sets the next.
"""

from __future__ import annotations

import logging
import time
from itertools import islice

from kvfs.alarms import Alarm, Alarms
from kvfs.names.content import KvFile
from kvfs.names.inode import SOME_NAMES, Inode
from kvfs.names.tree import Tree

log = logging.getLogger(__name__)

LINES_A_MINUTE = 100
"""Of the log, for files that expire; then it counts them."""


class Expiry:
    """The alarms of one tree's files, by inode number."""

    def __init__(self, tree: Tree, alarms: Alarms) -> None:
        self._tree = tree
        self._alarms = alarms
        self._of: dict[int, Alarm] = {}
        self._num_expired = 0
        """Files, in this minute of the log."""

    def note_use(self, inode: Inode) -> None:
        """Nobody has the file open any more, or its advice has changed: the time runs from now on."""
        self.forget(inode)
        if inode.advice.ttl_ms:
            inode.used_ns = time.time_ns()
            inode.note_change()
        if inode.advice.ttl_ms and not inode.advice.is_pinned and not inode.opens:
            self._of[inode.number] = self._alarms.set(inode.advice.ttl_s, lambda: self._expire(inode))

    def resume(self, inode: Inode) -> None:
        """A file that was restored: its time ran on while no daemon was there."""
        if inode.advice.ttl_ms and not inode.advice.is_pinned:
            used_ns = max(inode.used_ns, inode.mtime_ns)  # it may have been open when the daemon ended
            # A clock that was years ahead when the file was used must not keep it for years.
            unused_s = max(0.0, (time.time_ns() - used_ns) / 1e9)
            left_s = max(0.0, inode.advice.ttl_s - unused_s)
            self._of[inode.number] = self._alarms.set(left_s, lambda: self._expire(inode))

    def forget(self, inode: Inode) -> None:
        """Nothing leads to the file any more."""
        alarm = self._of.pop(inode.number, None)
        if alarm is not None:
            self._alarms.cancel(alarm)

    def _expire(self, inode: Inode, *, is_said: bool = False) -> None:
        """Remove some of its names, and the rest in later turns."""
        del self._of[inode.number]
        if inode.opens or not isinstance(inode.content, KvFile):
            return  # in use, or a plain file by now: its next close looks again
        if not is_said:
            self._say(inode)
        for directory, name in tuple(islice(inode.names, SOME_NAMES)):
            self._tree.unlink(self._tree.get(directory), name)
        if inode.names:
            self._of[inode.number] = self._alarms.set(0, lambda: self._expire(inode, is_said=True))

    def _say(self, inode: Inode) -> None:
        if not self._num_expired:
            self._alarms.set(60, self._say_how_many)
        self._num_expired += 1
        if self._num_expired <= LINES_A_MINUTE:
            path = str(self._tree.path_of(inode))
            log.info("%s expires: unused for %g s", path, inode.advice.ttl_s, extra={"file": path})

    def _say_how_many(self) -> None:
        if self._num_expired > LINES_A_MINUTE:
            log.info("%d more files have expired within a minute", self._num_expired - LINES_A_MINUTE)
        self._num_expired = 0

    def check(self) -> None:
        """Raise AssertionError unless every file that has to expire will."""
        for inode in self._tree:
            due = inode.advice.ttl_ms and not inode.advice.is_pinned and not inode.opens
            if due and inode.names and isinstance(inode.content, KvFile):
                assert inode.number in self._of, f"inode {inode.number} has a TTL and no alarm"
