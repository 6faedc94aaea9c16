"""A journal that also notes, for one task, which inodes have changed."""

from __future__ import annotations

from collections.abc import Callable

from kvfs.base.bell import Bell
from kvfs.durable.journal import Directories, Journal
from kvfs.names.inode import Inode


class WatchedJournal(Journal):
    """A journal with a set of changed inodes, which a task takes."""

    def __init__(self, directories: Callable[[], Directories]) -> None:
        super().__init__(directories)
        self._changed: dict[Inode, None] = {}
        self.changed_bell = Bell()

    def of_inode(self, inode: Inode) -> None:
        super().of_inode(inode)
        self._changed[inode] = None
        self.changed_bell.ring()

    def take_changed(self) -> dict[Inode, None]:
        """Return the inodes that have changed since the last call: content, attributes or names."""
        taken, self._changed = self._changed, {}
        return taken
