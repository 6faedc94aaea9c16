"""Heat: which files are used, and how much.

A second in which a file is used counts 1, a second that was a minute ago one half, two minutes ago one quarter. What is
not used cools at the same pace as everything else, so its place among the others does not change. What is kept is
therefore the logarithm of the sum as it would be at time 0: it changes only with a use, and is compared as it is.

And who is hot can be told without a look at all files: a file that fell behind so many others can't come before them
again without a use, which brings it back here. Besides the hottest of all, those of each owner are kept: whoever may
see only files of his own sees the hottest of those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import exp2

from kvfs._pages import lib
from kvfs.names.content import KvFile
from kvfs.names.inode import Inode

HALF_LIFE_S = 60.0
USE_S = 1.0
"""Uses within so long of the last one that counted are one."""
MOST = 1 / (1 - exp2(-USE_S / HALF_LIFE_S))
"""The heat of a file that was used in every second, ever."""
NUM_OF_ALL, NUM_OF_OWNER = 512, 128
"""So many are kept; up to twice as many until it is worth while to look who they are."""


@dataclass(slots=True)
class _Hottest:
    """Files, the hottest among them."""

    num_kept: int
    inodes: dict[Inode, None] = field(default_factory=dict)

    def add(self, inode: Inode) -> None:
        self.inodes[inode] = None
        if len(self.inodes) > 2 * self.num_kept:
            hottest = sorted(self.inodes, key=_heat_of, reverse=True)
            self.inodes = dict.fromkeys(hottest[: self.num_kept])


class Heat:
    """The files of one volume that are used. Owned by the trio thread; a use costs it a microsecond."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, used: Callable[[], Iterable[tuple[Inode, KvFile]]] = tuple
    ) -> None:
        """`used`: gives the files that the core has used since it was asked last."""
        self._clock = clock
        self._used = used
        self._of_all = _Hottest(NUM_OF_ALL)
        self._of_owner: dict[int, _Hottest] = {}
        """By uid."""

    def note(self, inode: Inode, kv: KvFile) -> None:
        """A file is used just now: opened, forked, read, or appended to."""
        lib.core_note_use(kv.table.core, self._clock())
        self._keep(inode, kv)

    def _keep(self, inode: Inode, kv: KvFile) -> None:
        if inode.names and inode.content is kv:
            self._of_all.add(inode)
            of_owner = self._of_owner.get(inode.uid)
            if of_owner is None:
                of_owner = self._of_owner[inode.uid] = _Hottest(NUM_OF_OWNER)
            of_owner.add(inode)

    def forget(self, inode: Inode) -> None:
        """Nothing leads to the file any more."""
        if inode not in self._of_all.inodes and inode.uid not in self._of_owner:
            return
        self._of_all.inodes.pop(inode, None)
        of_owner = self._of_owner.get(inode.uid)
        if of_owner is not None:
            of_owner.inodes.pop(inode, None)
            if not of_owner.inodes:
                del self._of_owner[inode.uid]

    def hottest(self, uid: int) -> list[Inode]:
        """Return the hottest of all files and of one owner's, the hottest first; some may have no name any more."""
        for inode, kv in self._used():
            self._keep(inode, kv)
        of_owner = self._of_owner.get(uid)
        found = self._of_all.inodes | (of_owner.inodes if of_owner is not None else {})
        return sorted(found, key=_heat_of, reverse=True)

    def share(self, kv: KvFile) -> float:
        """Its heat now, of the most that there can be: 0 to 1."""
        return exp2(kv.heat - self._clock() / HALF_LIFE_S) / MOST if kv.used_s else 0.0

    def idle_s(self, kv: KvFile) -> float:
        """Seconds since its last use, or since a use that was within a second of it."""
        return self._clock() - kv.used_s


def _heat_of(inode: Inode) -> float:
    return inode.content.heat if isinstance(inode.content, KvFile) else 0.0
