"""Heat: how much each file is used.

The heat of a file is a sum over the seconds in which it was used. The present second counts 1, a second a minute ago
counts one half, a second two minutes ago one quarter. All unused files cool at the same pace, so their order does not
change. Therefore the stored number is the logarithm of the sum, extrapolated to time 0. This number changes only with a
use, and can be compared directly.

The hottest files are found without a search through all files. A cooler file can't overtake a hotter file without a
use, and each use adds the file to the list again. The hottest files of each owner are kept as well, for a user who may
see only his own files.
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
"""Seconds after a counted use in which further uses are not counted."""
MOST = 1 / (1 - exp2(-USE_S / HALF_LIFE_S))
"""The heat of a file that was used in every second of the past."""
NUM_OF_ALL, NUM_OF_OWNER = 512, 128
"""Number of hottest files that are kept. A list grows to twice this number before it is cut back."""


@dataclass(slots=True)
class _Hottest:
    """A set of files that keeps the hottest files."""

    num_kept: int
    inodes: dict[Inode, None] = field(default_factory=dict)

    def add(self, inode: Inode) -> None:
        self.inodes[inode] = None
        if len(self.inodes) > 2 * self.num_kept:
            hottest = sorted(self.inodes, key=_heat_of, reverse=True)
            self.inodes = dict.fromkeys(hottest[: self.num_kept])


class Heat:
    """The used files of one volume. Owned by the trio thread. Noting a use takes a microsecond."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, used: Callable[[], Iterable[tuple[Inode, KvFile]]] = tuple
    ) -> None:
        """`used` returns the files that the core has used since the last call."""
        self._clock = clock
        self._used = used
        self._of_all = _Hottest(NUM_OF_ALL)
        self._of_owner: dict[int, _Hottest] = {}
        """The hottest files of each uid."""

    def note(self, inode: Inode, kv: KvFile) -> None:
        """Note a use of a file: an open, a fork, a read, or an append."""
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
        """Forget a file that has lost its last name."""
        if inode not in self._of_all.inodes and inode.uid not in self._of_owner:
            return
        self._of_all.inodes.pop(inode, None)
        of_owner = self._of_owner.get(inode.uid)
        if of_owner is not None:
            of_owner.inodes.pop(inode, None)
            if not of_owner.inodes:
                del self._of_owner[inode.uid]

    def hottest(self, uid: int) -> list[Inode]:
        """Return the hottest of all files and the hottest of one owner's files, in one list, the hottest first. Some of
        the files may have lost their names.
        """
        for inode, kv in self._used():
            self._keep(inode, kv)
        of_owner = self._of_owner.get(uid)
        found = self._of_all.inodes | (of_owner.inodes if of_owner is not None else {})
        return sorted(found, key=_heat_of, reverse=True)

    def share(self, kv: KvFile) -> float:
        """Return a file's heat now, as a share of the greatest heat possible: 0 to 1."""
        return exp2(kv.heat - self._clock() / HALF_LIFE_S) / MOST if kv.used_s else 0.0

    def idle_s(self, kv: KvFile) -> float:
        """Return the seconds since the last counted use. An uncounted use may have followed within a second."""
        return self._clock() - kv.used_s


def _heat_of(inode: Inode) -> float:
    return inode.content.heat if isinstance(inode.content, KvFile) else 0.0
