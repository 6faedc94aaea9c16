"""A journal that also notes, for one task, which inodes have changed."""

from __future__ import annotations

from collections.abc import Callable

from kvfs.base.bell import Bell
from kvfs.durable.journal import Directories, Journal
from kvfs.names.inode import Changes, Inode


class Watch(Changes):
    """A set of changed inodes, which a task takes."""

    def __init__(self) -> None:
        self._changed: dict[Inode, None] = {}
        self.bell = Bell()

    def of_inode(self, inode: Inode) -> None:
        self._changed[inode] = None
        self.bell.ring()

    def take(self) -> dict[Inode, None]:
        """Return the inodes that have changed since the last call: content, attributes or names."""
        taken, self._changed = self._changed, {}
        return taken


class WatchedJournal(Journal):
    """A journal with a watch over all inodes, those of a fleet included."""

    def __init__(self, directories: Callable[[], Directories]) -> None:
        super().__init__(directories)
        self.watch = Watch()

    @property
    def unkept(self) -> Watch:
        return self.watch

    def of_inode(self, inode: Inode) -> None:
        super().of_inode(inode)
        self.watch.of_inode(inode)
