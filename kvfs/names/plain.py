"""A plain file's bytes: a backing file, made when the first byte is written.

The size is kept here, so that `stat` asks nobody. What may wait for the disk is for workers: `read_at`, `read_into`,
`write_at`, `resize`, `allocate`, `sync`. All else is the owner's, and waits for nothing. The owner lets one worker
change the file at a time; others may read meanwhile. They get bytes from before or after, and fewer where the file was
cut.

A worker may be in a call for ever, if the disk never answers. Its owner does not know then what the call has done, and
lets no other change begin before it has ended (`kvfs.mount.disk_work`). When it ends, `size` is right again; until then
the size is that of before, and only a cut shows at once. So whatever has become of it, no byte that was written later
is lost to a call that was given up, and bytes that it wrote are never shown beyond the size.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from kvfs.names.disk import NOT_OFFERED, Disk
from kvfs.names.gaps import Gaps
from kvfs.names.removals import Descriptor, Removals
from kvfs.names.sums import EXTENT_BYTES, Sums, Verified, num_extents, sum_of
from libsym.errors import SymError

log = logging.getLogger(__name__)

_ASKED_FOR = frozenset({errno.EFBIG, errno.EINVAL, errno.EOPNOTSUPP})
"""Errors that come from what was asked for, and not from the disk below."""

Remove: TypeAlias = Callable[[Path, Descriptor | None], None]
"""Unlinks a backing file, now or later, and lets go of its descriptor after that; neither on the owner's thread, which
calls it, once at most for a file, and not for one that was never written."""

_BACKING_NAME = re.compile(r"(\d+)\.(\d+)\.plain")
_NOTHING = range(0)
_NEVER = -1


def backing_name(inode: int, number: int) -> str:
    """Of the backing file of an inode that has this number: no other one of the inode ever had it."""
    return f"{inode}.{number}.plain"


@dataclass(frozen=True, slots=True)
class Backing:
    """A file that is called as a backing file is."""

    inode: int
    number: int

    @property
    def name(self) -> str:
        return backing_name(self.inode, self.number)


def backing_files(directory: Path) -> list[Backing]:
    """Backing files that lie in a directory, in the order of their names."""
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    matches = [match for path in paths if (match := _BACKING_NAME.fullmatch(path.name))]
    return [Backing(int(match[1]), int(match[2])) for match in matches]


class PlainFile:
    """The content of a plain file; satisfies `ByteSource`, so an image in it can be imported."""

    __slots__ = (
        "__weakref__",
        "_directory",
        "_disk",
        "_doubtful",
        "_exists",
        "_file",
        "_inherited_bytes",
        "_lock",
        "_name",
        "_opening",
        "_removals",
        "_remove",
        "_synced",
        "_syncing",
        "changes",
        "charged",
        "gaps",
        "is_gone",
        "is_lost",
        "size",
        "sums",
    )

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        disk: Disk | None = None,
        removals: Removals | None = None,
        remove: Remove | None = None,
    ) -> None:
        """`remove`: what unlinks it in the end; without it `removals` does, at once."""
        self._directory = directory
        self._name = name
        self._disk = disk or Disk()
        self._removals = removals or Removals(self._disk)
        self._remove = remove or self._removals.remove
        self.size = 0
        self.charged = 0
        """Bytes that somebody is charged for: its size, except while it is being written or imported."""
        self.changes = 0
        """Counts where changes begin and end: equal counts mean equal bytes, and that nothing is being changed now if
        nothing was then."""
        self.gaps = Gaps()
        """Bytes below the size that nobody has written, as far as this daemon saw it. Whoever changes the file changes
        them."""
        self.is_lost = False
        """Whether its bytes should be there, and are not: it can be emptied or removed, and not opened."""
        self.sums = Sums()
        """Checksums: who changes bytes says so before, see `Sums`."""
        self._synced = 0
        """`changes` when the last sync that succeeded began; -1: there was none, and there are bytes."""
        self._doubtful = _NOTHING
        """Bytes that a sync may have lost, see `sync`."""
        self._file: Descriptor | None = None
        self._exists = False
        """Whether there may be a backing file."""
        self._inherited_bytes: int | None = None
        """The bytes of the backing file that count, if it may be longer."""
        self.is_gone = False
        """Whether the bytes were removed for good: no backing file must be made again."""
        self._lock = threading.Lock()
        """Guards `_file` and `is_gone`; nobody waits for the disk with it."""
        self._opening = threading.Lock()
        """Taken by workers alone: they wait for the disk with it."""
        self._syncing = threading.Lock()
        """The same: of syncs under way at once, Linux tells one alone of an error."""

    @classmethod
    def existing(
        cls,
        directory: Path,
        name: str,
        size: int,
        *,
        disk: Disk | None = None,
        removals: Removals | None = None,
        remove: Remove | None = None,
    ) -> Self:
        """The file of a daemon that has ended, perhaps before a sync. Bytes that lie behind `size` are cut off
        before anybody sees it.
        """
        file = cls(directory, name, disk=disk, removals=removals, remove=remove)
        file.size = file._inherited_bytes = size
        file._synced = -1
        file._exists = True
        file._synced = _NEVER
        return file

    @property
    def name(self) -> str:
        return self._name

    @property
    def number(self) -> int:
        return int(self._name.split(".")[1])

    @property
    def inode(self) -> int:
        """The number of the inode that it was made for."""
        return int(self._name.split(".")[0])

    @property
    def exists(self) -> bool:
        return self._exists

    @property
    def path(self) -> Path:
        return self._directory / self._name

    # Without waiting, for the owner

    def read_nowait(self, offset: int, size: int) -> bytes | memoryview | None:
        """As `read_at` if all of it is in memory, else None."""
        wanted = min(size, self.size - offset)
        if wanted <= 0:
            return b""
        file = self._file
        if file is None or not self._disk.nowait.reads:
            return None
        room = bytearray(wanted)
        try:
            count = self._disk.preadv(file.number, [room], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in NOT_OFFERED:
                self._disk.nowait.reads = False
            elif error.errno != errno.EAGAIN:
                raise self._failed("read", error) from error
            return None
        return memoryview(room) if count == wanted else None  # fewer: the rest is not in memory, or not there

    def write_nowait(self, offset: int, data: bytes | memoryview) -> int:
        """As much of `data`, from its beginning, as can be written without waiting: how many bytes."""
        file = self._file
        if file is None or not self._disk.nowait.writes:
            return 0
        doubtful = self._doubtful
        self.changes += 1
        try:
            written = self._disk.pwritev(file.number, [data], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in NOT_OFFERED:
                self._disk.nowait.writes = False
            elif error.errno != errno.EAGAIN:
                raise self._failed("write", error) from error
            return 0
        finally:
            self.changes += 1
        self._filled(offset, offset + written)
        self._written(doubtful, offset, offset + written)
        self.sums.wrote(offset, memoryview(data)[:written])
        return written

    def close(self) -> None:
        """Give the descriptor back; the next access opens the file again."""
        with self._lock:
            self._file = None

    def discard(self) -> None:
        """Remove the bytes for good. A worker that is at work on them may end it, with what nobody sees."""
        self.size = 0
        self.changes += 1
        with self._lock:
            self.is_gone = True
            file, self._file = self._file, None
        if self._exists:
            self._remove(self.path, file)

    # For workers

    def read_at(self, offset: int, size: int) -> bytes:
        """As `pread(2)`: fewer bytes only at the end."""
        return bytes(self.read_to(offset, memoryview(bytearray(max(0, min(size, self.size - offset))))))

    def read_to(self, offset: int, room: memoryview, *, keep: bool = True) -> memoryview:
        """As `read_at`: the part of the room that has bytes then. `keep`: the file stays open for those to come."""
        changes = self.changes  # before the size: see `resize`
        room = room[: max(0, self.size - offset)]
        found = self._pread(offset, room, keep=keep)
        if len(found) < len(room) and self.changes == changes:
            raise SymError(f"backing file {self.path} gave {len(found)} of {len(room)} bytes at offset {offset}")
        return found

    def read_into(self, offset: int, room: memoryview) -> int:
        """As `preadv(2)`: the bytes there are, straight to where they are to be."""
        if offset >= self.size:
            return 0
        try:
            file = self._opened()
            return self._disk.preadv(file.number, [room], offset, 0)
        except OSError as error:
            raise self._failed("read", error) from error

    def verified(self, start: int, room: memoryview) -> Verified:
        """Read as many bytes as there is room for, and compare the extents that begin there with their sums."""
        first, stop = num_extents(start), num_extents(start + len(room))
        wanted = [(each, self.sums.expected(each)) for each in range(first, stop)]
        found = Verified(self._pread(start, room[: max(0, self.size - start)]), [], [])
        for extent, expected in wanted:
            begin = extent * EXTENT_BYTES - start
            piece = found.data[begin : begin + expected.num_bytes]
            if expected.value:
                is_good = len(piece) == expected.num_bytes and sum_of(piece) == expected.value
                (found.good if is_good else found.damaged).append((extent, expected))
        return found

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data`, or raise."""
        view, start, doubtful = memoryview(data), offset, self._doubtful
        self.changes += 1
        try:
            file = self._opened()
            while view:
                written = self._disk.pwritev(file.number, [view], offset, 0)
                self._filled(offset, offset + written)
                self.sums.wrote(offset, view[:written])
                offset += written
                view = view[written:]
        except OSError as error:
            self.sums.failed(start, start + len(data))
            raise self._failed("write", error) from error
        finally:
            self._written(doubtful, start, offset)
            self.changes += 1

    def resize(self, size: int) -> None:
        """As `ftruncate(2)`."""
        before = self.size
        self.size = min(before, size)  # no read begins that expects what will be cut, and one that has begun
        self.changes += 1  # sees that something changed
        try:
            if size or before:
                file = self._opened()
                self._disk.ftruncate(file.number, size)
        except OSError as error:
            self._grown(before)
            raise self._failed("resize", error) from error
        finally:
            self.changes += 1
        self._grown(size)
        self.gaps.grown(before, size)
        self.gaps.cut(size)
        self._doubtful = range(self._doubtful.start, min(self._doubtful.stop, size))

    def allocate(self, offset: int, size: int) -> None:
        """As `posix_fallocate(3)`."""
        before = self.size
        self.changes += 1
        try:
            file = self._opened()
            self._disk.allocate(file.number, offset, size)
        except OSError as error:
            raise self._failed("allocate", error) from error
        finally:
            self.changes += 1
        self._grown(offset + size)
        self.gaps.grown(before, offset + size)

    def sync(self) -> None:
        """As `fdatasync(2)`: bytes that were written before are on the disk, or this raises.

        The name of a new backing file is its directory's to sync. A sync that fails leaves in doubt all bytes that the
        file has: Linux takes pages for clean that it could not write, and the next fdatasync would succeed. So each
        sync fails from then on, until the bytes are written once more, from the first to the last, or cut off.
        """
        with self._syncing:
            seen = self.changes
            if self._doubtful:
                message = f"backing file {self.path} could not be synced, and was not written anew since"
                raise SymError(message, errno.EIO)
            if self._exists and seen != self._synced:
                try:
                    file = self._opened(keep=False)
                except OSError as error:
                    if self.is_gone:
                        return
                    raise self._failed("sync", error) from error
                try:
                    self._disk.fdatasync(file.number)
                except OSError as error:
                    self._doubtful = range(self.size)
                    raise self._failed("sync", error) from error
            self._synced = seen

    @property
    def is_dirty(self) -> bool:
        """Whether bytes were changed since the last successful sync began, or are being changed now."""
        return self.changes != self._synced

    def is_synced(self, changes: int) -> bool:
        """Whether the bytes are on disk that there were when `changes` was this."""
        return self._synced >= changes

    @property
    def sync_failed(self) -> bool:
        """Whether a sync has lost bytes, perhaps, that were not written anew since."""
        return bool(self._doubtful)

    # Parts

    def _pread(self, offset: int, room: memoryview, *, keep: bool = True) -> memoryview:
        """Fill as much of the room as there are bytes: none of a file that was removed meanwhile."""
        if not room:
            return room
        try:
            file = self._opened(keep=keep)
            return room[: self._disk.pread(file.number, [room], offset)]
        except OSError as error:
            if self.is_gone:
                return room[:0]
            raise self._failed("read", error) from error

    def _filled(self, start: int, stop: int) -> None:
        """A write has put bytes there."""
        self.gaps.grown(self.size, start)
        self.gaps.written(start, stop)
        self._grown(stop)

    def _grown(self, size: int) -> None:
        """The file has so many bytes at least; but none that anybody sees once they were removed."""
        with self._lock:
            if not self.is_gone:
                self.size = max(self.size, size)

    def _written(self, doubtful: range, start: int, end: int) -> None:
        """Note bytes of a call that began while `doubtful` was in doubt.

        A sync that has failed since then may have met them, or not: they are in doubt as well.
        """
        if doubtful is not self._doubtful:
            self._doubtful = range(max(self._doubtful.stop, end))
        elif doubtful and start <= doubtful.start < end:
            self._doubtful = range(min(end, doubtful.stop), doubtful.stop)

    def _opened(self, *, keep: bool = True) -> Descriptor:
        """The open file. `keep`: for those to come, too."""
        file = self._file
        if file is not None:
            return file
        with self._opening:
            if self._file is not None:
                return self._file
            if self.is_gone:
                raise _removed()
            was_there, self._exists = self._exists, True
            try:
                made = Descriptor(self._removals, self.path, os.O_RDWR | (0 if was_there and self.size else os.O_CREAT))
            except OSError:
                self._exists = was_there
                raise
            if self._inherited_bytes is not None:
                if self._disk.size(made.number) > self._inherited_bytes:
                    self._disk.ftruncate(made.number, self._inherited_bytes)
                self._inherited_bytes = None
            with self._lock:
                if not self.is_gone:
                    self._file = made if keep else self._file
                    return made
        if not was_there:  # made after it was removed, or just before
            with suppress(FileNotFoundError):
                self._disk.unlink(self.path)
        raise _removed()

    def _failed(self, verb: str, error: OSError) -> SymError:
        code = errno.EIO if error.errno == errno.ENOENT else error.errno  # nobody asked for that name
        failure = SymError(f"can't {verb} backing file {self.path}: {error.strerror}", code)
        if error.errno in _ASKED_FOR or self.is_gone:
            log.debug("%s", failure)
        else:
            log.warning("%s", failure)  # whoever made the request gets no more than the number
        return failure


def _removed() -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "it was removed")
