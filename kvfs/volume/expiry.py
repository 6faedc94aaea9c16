"""Expiry of files with a TTL that are not open: each file has an alarm, which removes all names of the file.

A file is in use while it is open, by a handle of a LIP or on the mount. So the last use of a file is its last close.
Setting advice counts as a use. An open file needs no alarm. If an alarm goes off while the file is open, nothing
happens, and the close sets the next alarm.
"""

from __future__ import annotations

import logging
import time
from itertools import islice

from kvfs.base.alarms import Alarm, Alarms
from kvfs.names.content import KvFile
from kvfs.names.inode import SOME_NAMES, Inode
from kvfs.names.tree import Tree

log = logging.getLogger(__name__)

LINES_A_MINUTE = 100
"""Lines of the log for files that expire, in one minute. Further files are only counted."""


class Expiry:
    """The alarms of one tree's files, by inode number."""

    def __init__(self, tree: Tree, alarms: Alarms) -> None:
        self._tree = tree
        self._alarms = alarms
        self._of: dict[int, Alarm] = {}
        self._num_expired = 0
        """Number of files that expired in the present minute."""

    def note_use(self, inode: Inode) -> None:
        """Begin the TTL of a file that was closed for the last time, or whose advice has changed."""
        self.forget(inode)
        if inode.advice.ttl_ms:
            inode.used_ns = time.time_ns()
            inode.note_change()
        if inode.advice.ttl_ms and not inode.advice.is_pinned and not inode.opens:
            self._of[inode.number] = self._alarms.set(inode.advice.ttl_s, lambda: self._expire(inode))

    def resume(self, inode: Inode) -> None:
        """Set the alarm of a restored file. The TTL also counts time in which no daemon was running."""
        if inode.advice.ttl_ms and not inode.advice.is_pinned:
            used_ns = max(inode.used_ns, inode.mtime_ns)  # the file may have been open when the daemon ended
            # If the clock was years ahead at the last use, the file must not stay for years.
            unused_s = max(0.0, (time.time_ns() - used_ns) / 1e9)
            left_s = max(0.0, inode.advice.ttl_s - unused_s)
            self._of[inode.number] = self._alarms.set(left_s, lambda: self._expire(inode))

    def forget(self, inode: Inode) -> None:
        """Cancel the alarm of a file that has lost its last name."""
        alarm = self._of.pop(inode.number, None)
        if alarm is not None:
            self._alarms.cancel(alarm)

    def _expire(self, inode: Inode, *, is_said: bool = False) -> None:
        """Remove some of the file's names. A new alarm, which is due immediately, removes further names."""
        del self._of[inode.number]
        if inode.opens or not isinstance(inode.content, KvFile):
            return  # the file is open, and its next close sets an alarm; or the file is a plain file by now
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
        """Raise AssertionError unless every file that has to expire has an alarm."""
        for inode in self._tree:
            due = inode.advice.ttl_ms and not inode.advice.is_pinned and not inode.opens
            if due and inode.names and isinstance(inode.content, KvFile):
                assert inode.number in self._of, f"inode {inode.number} has a TTL and no alarm"
