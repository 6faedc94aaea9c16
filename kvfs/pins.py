"""Files that are pinned: their pages stay in memory, and some of them only until a lease is over.

How much may be pinned is a share of memory, and for each user half of it. Leases are alarms; they are not kept: the
daemon that is started next knows nothing of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvfs.alarms import Alarm, Alarms
from kvfs.names.content import OWN, KvFile
from kvfs.names.inode import Inode
from kvfs.names.retention import FileAdvice
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from kvfs.tiers.pager import Pager
from libsym.errors import OverQuota

USERS_PART = 2
"""Of what may be pinned, one user may have one part of so many."""
FOR_GOOD = float("inf")


class Pins:
    """The pinned files of one volume. Owned by the trio thread."""

    def __init__(self, pager: Pager, pool: PagePool, alarms: Alarms, end: Callable[[Inode], None]) -> None:
        """`end` is called of each file whose lease is over."""
        self._pager = pager
        self._pool = pool
        self._alarms = alarms
        self._end = end
        self._inodes: dict[int, Inode] = {}
        self._leases: dict[int, Alarm] = {}

    def require(self, inode: Inode, kv: KvFile) -> None:
        """OverQuota: its owner has pinned as much as he may."""
        if self._pool.accounts.is_exempt(inode.uid):
            return
        tables = [kv.table, *(table for each in self._inodes.values() if each.uid == inode.uid for table in _of(each))]
        wanted = np.unique(np.concatenate([table.pages for table in tables])).size
        may_be = self._pager.departures.max_kept // USERS_PART
        if wanted > may_be:
            raise OverQuota(
                f"uid {inode.uid} would have {wanted} pages pinned, and {may_be} is the most that one user may: "
                "unpin others, or have pin_share raised"
            )

    def note(self, inode: Inode, old: FileAdvice, new: FileAdvice) -> None:
        """Its advice changes. NoSpace, OverQuota: it can't be pinned, and nothing has changed."""
        kv = inode.content
        if new.is_pinned:
            if isinstance(kv, KvFile) and kv.identity == OWN:
                self.require(inode, kv)
                self._pager.pin_file(kv.table, self._until_s(new))
            self._inodes[inode.number] = inode
        elif old.is_pinned:
            self.forget(inode)
            if isinstance(kv, KvFile) and kv.identity == OWN:
                self._pager.unpin_file(kv.table)
        self._set_lease(inode, new)

    def content_goes(self, inode: Inode, kv: KvFile) -> None:
        """A version is not the content of its file any more; who has it open still may."""
        if inode.number in self._inodes and kv.identity == OWN:
            self._pager.unpin_file(kv.table)

    def forget(self, inode: Inode) -> None:
        """Nothing leads to the file any more."""
        self._inodes.pop(inode.number, None)
        self._set_lease(inode, None)

    def _set_lease(self, inode: Inode, advice: FileAdvice | None) -> None:
        alarm = self._leases.pop(inode.number, None)
        if alarm is not None:
            self._alarms.cancel(alarm)
        if advice is not None and advice.lease_end_s is not None:
            self._leases[inode.number] = self._alarms.set(advice.left_s(), partial(self._over, inode))

    def _over(self, inode: Inode) -> None:
        del self._leases[inode.number]
        self._end(inode)

    def _until_s(self, advice: FileAdvice) -> float:
        """In the pager's time."""
        return FOR_GOOD if advice.pinned else time.monotonic() + advice.left_s()


def _of(inode: Inode) -> list[PageTable]:
    return [inode.content.table] if isinstance(inode.content, KvFile) else []
