"""`Storage`, all that the file system needs of its keeper; and `InMemory`, which keeps nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.pages.free_list import IntArray


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """Figures of what is kept, and of what is not yet."""

    disk_bytes: int = 0
    """Bytes that pages and plain files take on disk."""
    disk_limit_bytes: int | None = None
    num_unsynced_files: int = 0
    """Files, directories, … of which something is in memory alone."""
    unsynced_bytes: int = 0
    """Of pages in memory alone, of the named files that have had such pages longest."""
    num_commits: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    error: str = ""
    """Why the last write or commit failed; empty since the last commit that did not."""
    num_lost_files: int = 0
    """KV files that lost entries, until their owners say that this is known."""
    damage: str = ""
    """Losses of the index that the start found, until fsck has repaired them; empty: the index is whole."""


class Reading(Protocol):
    """Pages that are being read. They go on being read when nobody waits any more."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is written to the rooms any more."""
        ...

    async def wait(self) -> None:
        """When the rooms hold them, at once if that is over; EIO: damaged; ETIMEDOUT: the disk does not answer."""
        ...


class Storage(Protocol):
    """Where files are when the daemon has ended. On the trio thread, unless it says otherwise."""

    def read_cold(self, pages: IntArray, rooms: Sequence[memoryview], then: Callable[[], None]) -> Reading:
        """Begin to read pages of a file that are on disk alone into rooms; `then` is called when that is over."""
        ...

    async def sync(self, inode: Inode) -> None:
        """Return when the file, with all its names, would survive a power cut; raise why it would not."""
        ...

    async def sync_all(self) -> None:
        """The same for everything."""
        ...

    async def bring_xattrs(self, inode: Inode) -> None:
        """Return when an inode's attributes are at hand, and nothing else was done since; EIO: they are damaged."""
        ...

    async def mark(self, content: PlainFile) -> None:
        """Return when a commit has what was asked for of the file's sums; or raise why it has not."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether many attributes are in memory because they are not kept yet: more have to `catch_up` before."""
        ...

    async def catch_up(self) -> None:
        """Return when some more are kept; or raise why they can't be."""
        ...

    def require_room(self, num_bytes: int) -> None:
        """NoSpace: what is no page may not grow by so much."""
        ...

    def require_noted(self, num_bytes: int) -> None:
        """NoSpace: attributes, and paths in symbolic links, may not grow by so much."""
        ...

    def num_free_slots(self) -> int | None:
        """Pages that there is room for on disk; None: as many as there may be at all."""
        ...

    def needs_backing(self, name: str) -> bool:
        """Whether a crash would bring back a file that has this backing file: `Volume.forget_backing` says when not."""
        ...

    def statistics(self) -> StorageStatistics: ...

    def check(self) -> None:
        """Raise AssertionError unless each slot on disk is free, or somebody's."""
        ...


class InMemory:
    """Everything is in memory, and nothing outlives the daemon: for tests of what has nothing to do with that."""

    def read_cold(self, pages: IntArray, rooms: Sequence[memoryview], then: Callable[[], None]) -> Reading:
        raise AssertionError(f"pages {pages} are nowhere, for {len(rooms)} rooms and {then}")

    async def sync(self, inode: Inode) -> None:
        """As on tmpfs."""

    async def sync_all(self) -> None:
        """As on tmpfs."""

    async def bring_xattrs(self, inode: Inode) -> None:
        raise AssertionError(f"the attributes of inode {inode.number} are nowhere")

    async def mark(self, content: PlainFile) -> None:
        raise AssertionError(f"{content.name} has sums, and nothing keeps them")

    @property
    def is_behind(self) -> bool:
        return False

    async def catch_up(self) -> None:
        """Return at once: no attributes wait for a commit."""

    def require_room(self, num_bytes: int) -> None:
        """The file system below will say."""

    def require_noted(self, num_bytes: int) -> None:
        """Memory will say."""

    def num_free_slots(self) -> int | None:
        return None

    def needs_backing(self, name: str) -> bool:
        return not name

    def statistics(self) -> StorageStatistics:
        return StorageStatistics()

    def check(self) -> None:
        """There are no slots."""
