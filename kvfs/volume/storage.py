"""`Storage`: the part of the keeper's interface that the file system needs. `InMemory` is a storage without a disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.pages.free_list import IntArray


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """Figures of the data on disk, and of changes that are only in memory."""

    disk_bytes: int = 0
    """Bytes that pages and plain files take on disk."""
    disk_limit_bytes: int | None = None
    num_unsynced_files: int = 0
    """Number of files, directories and so on with changes that are only in memory."""
    unsynced_bytes: int = 0
    """Bytes of pages that are only in memory. The sum covers only the named files that have had such pages longest."""
    num_commits: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    error: str = ""
    """The error of the last write or commit. Empty: the last commit succeeded."""
    num_lost_files: int = 0
    """Number of KV files that lost entries, until their owners acknowledge the loss."""
    damage: str = ""
    """Damage to the index that was found at the start, until fsck has repaired it. Empty: the index is whole."""


class Reading(Protocol):
    """A read of pages that is under way. The read continues even if no reader waits any longer."""

    @property
    def is_over(self) -> bool:
        """Whether the read no longer writes to its memory."""
        ...

    async def wait(self) -> None:
        """Wait until the read's memory holds the pages. EIO: the pages are damaged. ETIMEDOUT: the disk does not
        respond.
        """
        ...


class Storage(Protocol):
    """Keeps files beyond the daemon's end. Called on the trio thread, unless a method says otherwise."""

    def read_cold(self, pages: IntArray, rooms: Sequence[memoryview], then: Callable[[], None]) -> Reading:
        """Begin to read pages of a file into the memory `rooms`. The pages are on disk alone. `then` is called when the
        read ends.
        """
        ...

    async def sync(self, inode: Inode) -> None:
        """Return when the file, with all its names, would survive a power cut. Raise an error with the reason if the
        file can't be synced.
        """
        ...

    async def sync_all(self) -> None:
        """Return when all files would survive a power cut. Raise an error with the reason if a file can't be synced."""
        ...

    async def bring_xattrs(self, inode: Inode) -> None:
        """Read an inode's attributes into memory. After the read, no other task runs before the return. EIO: the
        attributes are damaged.
        """
        ...

    async def mark(self, content: PlainFile) -> None:
        """Return when the requested marks of a plain file's sums are committed. Raise an error with the reason if they
        can't be committed.
        """
        ...

    @property
    def is_behind(self) -> bool:
        """Whether many attributes in memory wait for a commit. If so, callers call `catch_up` before they add more."""
        ...

    async def catch_up(self) -> None:
        """Return when more attributes are committed. Raise an error with the reason if they can't be committed."""
        ...

    def require_room(self, num_bytes: int) -> None:
        """Raise NoSpace unless the bytes that are not in pages may grow by `num_bytes`."""
        ...

    def require_noted(self, num_bytes: int) -> None:
        """Raise NoSpace unless attributes and symbolic links' paths may grow by `num_bytes`."""
        ...

    def num_free_slots(self) -> int | None:
        """Return the number of pages for which the disk has room. None: the disk sets no limit."""
        ...

    def needs_backing(self, name: str) -> bool:
        """Return whether a file would have this backing file again after a crash. If so, the storage calls
        `Volume.forget_backing` later.
        """
        ...

    def statistics(self) -> StorageStatistics: ...

    def check(self) -> None:
        """Raise AssertionError unless each slot on disk is free or in use."""
        ...


class InMemory:
    """Storage without a disk: everything is in memory, and nothing outlives the daemon. For tests of other code."""

    def read_cold(self, pages: IntArray, rooms: Sequence[memoryview], then: Callable[[], None]) -> Reading:
        raise AssertionError(f"pages {pages} are nowhere, for {len(rooms)} rooms and {then}")

    async def sync(self, inode: Inode) -> None:
        """Do nothing, as on tmpfs."""

    async def sync_all(self) -> None:
        """Do nothing, as on tmpfs."""

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
        """Do nothing: the file system below reports its own errors."""

    def require_noted(self, num_bytes: int) -> None:
        """Do nothing: only memory limits attributes."""

    def num_free_slots(self) -> int | None:
        return None

    def needs_backing(self, name: str) -> bool:
        return not name

    def statistics(self) -> StorageStatistics:
        return StorageStatistics()

    def check(self) -> None:
        """Do nothing: there are no slots."""
