"""Pinned files: their pages stay in memory, for good or until a lease ends.

Pinned pages may take a share of memory. The pinned pages of one user may take half of that share. Leases are alarms in
memory: the next daemon does not know them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvfs.base.alarms import Alarm, Alarms
from kvfs.names.content import OWN, KvFile
from kvfs.names.inode import Inode
from kvfs.names.retention import FileAdvice
from kvfs.pages.accounts import Accounts
from kvfs.pages.table import PageTable
from kvfs.tiers.pager import Pager
from libsym.errors import OverQuota

USERS_PART = 2
"""The bound for all users together is this many times the bound for one user."""
FOR_GOOD = float("inf")


class Pins:
    """The pinned files of one volume. Owned by the trio thread."""

    def __init__(
        self, pager_of: Callable[[PageTable], Pager], accounts: Accounts, alarms: Alarms, end: Callable[[Inode], None]
    ) -> None:
        """`pager_of` returns the pager of a file's pages. `end` is called for each file whose lease ends."""
        self._pager_of = pager_of
        self._accounts = accounts
        self._alarms = alarms
        self._end = end
        self._inodes: dict[int, Inode] = {}
        self._leases: dict[int, Alarm] = {}

    def require(self, inode: Inode, kv: KvFile) -> None:
        """Raise OverQuota if the file's owner may not pin this file in addition to his pinned files."""
        if self._accounts.is_exempt(inode.uid):
            return
        others = (table for each in self._inodes.values() if each.uid == inode.uid for table in _of(each))
        tables = [kv.table, *(table for table in others if table.pool is kv.table.pool)]
        wanted = np.unique(np.concatenate([table.pages for table in tables])).size
        may_be = self._pager_of(kv.table).departures.max_kept // USERS_PART
        if wanted > may_be:
            raise OverQuota(
                f"uid {inode.uid} would have {wanted} pages pinned, and {may_be} is the most that one user may: "
                "unpin others, or have pin_share raised"
            )

    def note(self, inode: Inode, old: FileAdvice, new: FileAdvice) -> None:
        """Pin or unpin a file when its advice changes. NoSpace, OverQuota: the file can't be pinned, and nothing
        changes.
        """
        kv = inode.content
        if new.is_pinned:
            if isinstance(kv, KvFile) and kv.identity == OWN:
                self.require(inode, kv)
                self._pager_of(kv.table).pin_file(kv.table, self._until_s(new))
            self._inodes[inode.number] = inode
        elif old.is_pinned:
            self.forget(inode)
            if isinstance(kv, KvFile) and kv.identity == OWN:
                self._pager_of(kv.table).unpin_file(kv.table)
        self._set_lease(inode, new)

    def content_goes(self, inode: Inode, kv: KvFile) -> None:
        """Unpin a version that is no longer the content of its file. Handles may still have it open."""
        if inode.number in self._inodes and kv.identity == OWN:
            self._pager_of(kv.table).unpin_file(kv.table)

    def forget(self, inode: Inode) -> None:
        """Forget a file that has lost its last name."""
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
        """Return the end of the pin by the pager's clock."""
        return FOR_GOOD if advice.pinned else time.monotonic() + advice.left_s()


def _of(inode: Inode) -> list[PageTable]:
    return [inode.content.table] if isinstance(inode.content, KvFile) else []
