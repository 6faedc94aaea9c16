"""Attributes that the kernel may keep, so that an unchanged file costs no request.

Programs change files by calls that the kernel does not see. So an inode whose attributes were granted has a holder
(`Inode.holder`), and its first change withdraws them: one message (FUSE_NOTIFY_INVAL_INODE, attributes alone) before
the call or the request that makes the change is answered. An answer with older attributes may still be on its way to
another thread of the kernel. The message raises the version of the inode's attributes, and the kernel then drops the
attributes of such an answer. So changes that the kernel makes itself are withdrawn, too. The answers of SETATTR, and of
requests that make a name, grant nothing, because the kernel accepts them regardless of the version.

The trio thread sends the message, so the message must not wait for the trio thread. The kernel takes no lock of the
inode for it. But it waits for an inode that is being evicted, and an eviction waits for reads and writes under way. So
nothing is granted while a file is open, by a program or on the mount, and an open withdraws. This rule also covers
files that a program extends in the core, without an event for each entry, and views of older versions
(`kvfs.mount.views`).

The kernel may not know the inode yet, because the answer of the first lookup is on its way. The message is then
repeated until the kernel knows or forgets the inode. Meanwhile only a descriptor that was opened without a request
(O_PATH) or a working directory can show the older attributes, because each use of a path asks for its names again. The
same holds if the kernel forgets an inode while an answer is on its way. Kernels before 6.13 accept such an answer
regardless of the version, so this FORGET withdraws, too.

The kernel keeps no attributes of the root, so that stat(2) of each path that begins at the mount point fails once the
daemon is gone. Only a descriptor, or `.` in a working directory below, still shows attributes. Instead of the kernel, C
(`shim.c`) keeps the root's answer until the attributes are withdrawn.

Names are not granted. The kernel forgets a name under the lock of its directory, for which the trio thread can't wait.
FUSE_NOTIFY_INC_EPOCH takes no lock, but then each path loses its names until their next lookup: getcwd(2) may fail, the
paths of open files end in "(deleted)", and mounts below are detached.

C answers further lookups of a name that was found with granted attributes (`kept_names.c`), until the attributes are
withdrawn. A change of the name changes the inode too, and so withdraws its attributes. Python counts the lookups that C
has answered when C drops the name. Up to then Python has counted at least one lookup of the inode.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import trio

from kvfs.base.bell import Bell
from kvfs.names.inode import Inode
from kvfs.names.tree import Tree, domain_below

log = logging.getLogger(__name__)

VALID_S = 86400
"""Time for which attributes are granted."""

REPEAT_S = 0.001
"""Time between two messages about an inode that the kernel does not know yet."""


class Grants:
    """The attributes that the kernel of one mount holds."""

    def __init__(self, tree: Tree, withdraw: Callable[[int], int]) -> None:
        """`withdraw`: sends the message about an inode, see `kvfs.mount.shim`."""
        self._tree = tree
        self._send = withdraw
        self._unheard: set[Inode] = set()
        """Inodes that have changed, and that the kernel does not know yet."""
        self._bell = Bell()

    def valid_s(self, inode: Inode, node: int) -> int:
        """Return the time for which the kernel (C for the root) may keep the attributes of an answer, which must be
        sent.
        """
        is_open = inode.opens and not inode.is_directory
        if is_open or node != inode.number or inode in self._unheard or self._is_shared(inode):
            return 0
        inode.holder = self
        return VALID_S

    def _is_shared(self, inode: Inode) -> bool:
        """Whether other machines change the inode."""
        shared = self._tree.agreement
        return shared is not None and domain_below(inode) is shared.root.domain

    def withdraw(self, inode: Inode) -> None:
        """Withdraw the attributes of an inode: see `Holder`."""
        inode.holder = None
        if not self._is_heard(inode):
            self._unheard.add(inode)
            self._bell.ring()

    def forgotten(self, inode: Inode, *, is_known: bool) -> None:
        """Note that the kernel has forgotten lookups of the inode's own node. `is_known`: lookups are left, because an
        answer is on its way.
        """
        if is_known:
            self.withdraw(inode)
        else:  # the kernel may still know nodes of other versions
            inode.holder = None
            self._unheard.discard(inode)

    def _is_heard(self, inode: Inode) -> bool:
        """Send the message. Return False if the kernel does not know the inode yet."""
        error = -self._send(inode.number)
        if error not in {0, errno.ENOENT, errno.ENODEV}:  # ENODEV: a mount that is gone holds no attributes
            log.error("the kernel keeps old attributes of inode %d: errno %d", inode.number, error)
        return error != errno.ENOENT

    async def repeat(self) -> None:
        """Repeat messages about inodes that the kernel did not know, in an endless loop."""
        while True:
            await self._bell.wait()
            while self._unheard:
                await trio.sleep(REPEAT_S)
                self._unheard = {inode for inode in self._unheard if not self._is_heard(inode)}
