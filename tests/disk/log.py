"""Log of a disk: its operations in order.

A file is known by a number that it keeps across renames and that no other file of the log ever gets. The directory that
is mounted is file 1. Only what was done is here: an operation that failed left nothing behind, except a sync, whose
failure says that what it was to cover may be lost for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ROOT = 1


@dataclass(frozen=True, slots=True)
class _OfFile:
    path: str
    file: int


@dataclass(frozen=True, slots=True)
class _OfName(_OfFile):
    parent: int
    name: str


@dataclass(frozen=True, slots=True)
class Made(_OfName):
    """A new file or directory, as the type in `mode` says."""

    mode: int
    uid: int
    gid: int


class Removed(_OfName):
    """A name is gone, by unlink or rmdir. The file lives on while it is open."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Renamed(_OfName):
    new_path: str
    new_parent: int
    new_name: str


@dataclass(frozen=True, slots=True)
class Written(_OfFile):
    """`size` bytes written at `offset` of the file; they are at `at` of the log's data."""

    offset: int
    size: int
    at: int


@dataclass(frozen=True, slots=True)
class Resized(_OfFile):
    size: int


@dataclass(frozen=True, slots=True)
class Allocated(_OfFile):
    """fallocate(2): there is room for these bytes. They read as before, or as zeros."""

    offset: int
    size: int
    keep_size: bool


@dataclass(frozen=True, slots=True)
class Punched(_OfFile):
    """FALLOC_FL_PUNCH_HOLE: these bytes read as zeros."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Changed(_OfFile):
    """Mode and owners as they are now; times are not recorded."""

    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Synced(_OfFile):
    """fsync, fdatasync or fsync of a directory is over.

    It covers what stands before `start` in the log: an operation that came while the sync was under way is not covered.
    """

    start: int
    data_only: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """Marker: all operations before it are on the disk. It stands at the beginning, or where the test puts it."""


@dataclass(frozen=True, slots=True)
class Marked:
    """A label that the test has put at this place in the log."""

    label: str


NameChange = Made | Removed | Renamed
FileChange = Written | Resized | Allocated | Punched | Changed
Operation = NameChange | FileChange | Synced | Settled | Marked


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """The operations, and the bytes that were written. Logs are cheap: the bytes are mapped, not copied."""

    operations: tuple[Operation, ...]
    data: memoryview

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def written(self, write: Written) -> memoryview:
        return self.data[write.at : write.at + write.size]

    def place_of(self, label: str) -> int:
        """How many operations stand before this mark; the last one, if there are several."""
        for place in range(len(self.operations) - 1, -1, -1):
            if self.operations[place] == Marked(label):
                return place
        raise KeyError(label)

    def until(self, place: int) -> Log:
        """The same log when it had `place` operations."""
        return Log(self.operations[:place], self.data)
