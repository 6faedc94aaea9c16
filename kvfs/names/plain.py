"""The bytes of a plain file. They are in a backing file, which a worker makes. Until then a small file is in memory.

The size is kept in memory, so `stat` needs no system call. Methods that may wait for the disk are for workers:
`read_at`, `read_into`, `write_at`, `resize`, `allocate`, `sync`. All other methods belong to the owner's thread, and
never block. The owner lets one worker at a time change the file. Other workers may read meanwhile. Their reads return
bytes from before or after the change, or fewer bytes if the file was cut.

If the disk hangs, a call of a worker may never return. Then the owner does not know what the call has done, and lets no
other change begin before the call has ended (`kvfs.mount.disk_work`). Until the end of the call, the file has its old
size, or the smaller size if the call cuts the file. After the call, `size` is right again. So an abandoned call never
overwrites bytes that were written later, and bytes that it wrote beyond the size are never shown.

A new file of up to UNWRITTEN_BYTES needs no worker before its first sync: the worker of the sync makes the backing file
and writes the bytes. A change meanwhile needs a worker, too, which waits for the first worker. Names wait for the end
of this one sync (`is_awaited`). If the disk refuses the bytes, they stay in memory for later syncs, and each further
change needs a worker, as in a large file.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from kvfs.names.disk import NOT_OFFERED, OPENS_NOT_OFFERED, Disk
from kvfs.names.gaps import UnfilledRanges
from kvfs.names.removals import Descriptor, Removals
from kvfs.names.sums import Sums, Verified, compare
from libsym.errors import SymError

log = logging.getLogger(__name__)

UNWRITTEN_BYTES = 64 << 10
"""The largest file without a backing file. Each write copies the whole file, which takes a few microseconds."""

_ASKED_FOR = frozenset({errno.EFBIG, errno.EINVAL, errno.EOPNOTSUPP})
"""Errors that the request causes, not the disk."""

Remove: TypeAlias = Callable[[Path, Descriptor | None], None]
"""Function that has another thread unlink a backing file, now or later, and then drop the file's descriptor. The
owner's thread calls the function at most once for a file, and never if no backing file was made.
"""

_BACKING_NAME = re.compile(r"(\d+)\.(\d+)\.plain")
_NOTHING = range(0)
_NEVER = -1


def backing_name(inode: int, number: int) -> str:
    """Return the name of an inode's backing file. `number` distinguishes the backing files that an inode has had."""
    return f"{inode}.{number}.plain"


@dataclass(frozen=True, slots=True)
class Backing:
    """The two parts of a backing file's name: the number of the inode, and the number of the backing file."""

    inode: int
    number: int

    @property
    def name(self) -> str:
        return backing_name(self.inode, self.number)


def backing_files(directory: Path) -> list[Backing]:
    """Return the backing files in a directory, ordered by name."""
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    matches = [match for path in paths if (match := _BACKING_NAME.fullmatch(path.name))]
    return [Backing(int(match[1]), int(match[2])) for match in matches]


class PlainFile:
    """The content of a plain file. It satisfies `ByteSource`, so that an image in the file can be imported."""

    __slots__ = (
        "__weakref__",
        "_directory",
        "_disk",
        "_doubtful",
        "_file",
        "_inherited_bytes",
        "_lock",
        "_name",
        "_opening",
        "_removals",
        "_remove",
        "_synced",
        "_syncing",
        "_unwritten",
        "changes",
        "charged",
        "gaps",
        "is_gone",
        "is_lost",
        "is_tried",
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
        """`remove` unlinks the backing file when the bytes are no longer needed. By default, `removals` unlinks the
        file at once.
        """
        self._directory = directory
        self._name = name
        self._disk = disk or Disk()
        self._removals = removals or Removals(self._disk)
        self._remove = remove or self._removals.remove
        self.size = 0
        self.charged = 0
        """Number of bytes charged to the account. Ordinarily this is the size, but not while the file is being written
        or imported.
        """
        self.changes = 0
        """Count that grows when a change begins and when a change ends. If two readings of the count are equal, the
        bytes are equal, because no change has begun or ended in between.
        """
        self.gaps = UnfilledRanges()
        """Ranges below the size that were added by growing the file, and that no write has filled since. Only the code
        that changes the file updates the ranges.
        """
        self.is_lost = False
        """Whether the file has lost its bytes. Then it can be emptied or removed, but not opened."""
        self.sums = Sums()
        """Checksums of the bytes. Code that changes bytes calls `sums.begin` first: see `Sums`."""
        self._synced = 0
        """Value of `changes` when the last successful sync began; -1: the file is from an earlier daemon, and no sync
        has succeeded since.
        """
        self._doubtful = _NOTHING
        """Range of the bytes that a failed sync may have lost: see `sync`."""
        self._file: Descriptor | None = None
        self._unwritten: bytes | None = b""
        """All bytes of a file that has no backing file; None: there is a backing file. `_lock` guards changes."""
        self.is_tried = False
        """Whether a first sync is over, or a worker has changed the file. From then on no more bytes are held in
        memory, and names do not wait for a sync.
        """
        self._inherited_bytes: int | None = None
        """Size of a file from an earlier daemon, until the backing file is cut to this size; else None."""
        self.is_gone = False
        """Whether the bytes were removed for good. No backing file may be made after that."""
        self._lock = threading.Lock()
        """Lock around `_file` and `is_gone`. No thread waits for the disk while it holds the lock."""
        self._opening = threading.Lock()
        """Lock for opening the backing file. Only workers take the lock, because its holder may wait for the disk."""
        self._syncing = threading.Lock()
        """Lock that admits one sync at a time, because Linux reports an error to only one of several concurrent syncs.
        """

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
        """Return a file of an earlier daemon, which may have ended before it synced the file. Bytes beyond `size` are
        cut off before any read.
        """
        file = cls(directory, name, disk=disk, removals=removals, remove=remove)
        file.size = file._inherited_bytes = size
        file._unwritten, file.is_tried = None, True
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
        """The number of the inode that the file was made for."""
        return int(self._name.split(".")[0])

    @property
    def exists(self) -> bool:
        """Whether there is a backing file."""
        return self._unwritten is None

    @property
    def is_awaited(self) -> bool:
        """Whether names have to wait for the first sync of the bytes. They wait once in the life of a file."""
        return not self.is_tried and bool(self.size)

    @property
    def path(self) -> Path:
        return self._directory / self._name

    # Methods for the owner's thread, which never wait

    def read_nowait(self, offset: int, size: int) -> bytes | memoryview | None:
        """Read as `read_at` does if all bytes are in memory; else return None."""
        wanted = min(size, self.size - offset)
        if wanted <= 0:
            return b""
        if (unwritten := self._unwritten) is not None:
            return memoryview(unwritten)[offset : offset + wanted]
        file = self._opened_nowait()
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
        self._disk.nowait.is_local = True
        return memoryview(room) if count == wanted else None  # else the rest is only on disk, or does not exist

    def verified_nowait(self, start: int, stop: int) -> Verified | None:
        """Read as `verified` does if all bytes are in memory; else return None."""
        wanted = self.sums.expected_in(start, stop)
        data = self.read_nowait(start, stop - start)
        return None if data is None else compare(memoryview(data), start, wanted)

    @property
    def writes_nowait(self) -> bool:
        """Whether `write_nowait` may write."""
        return not self.exists or self._disk.nowait.writes

    def write_nowait(self, offset: int, data: bytes | memoryview) -> int:
        """Write as much of the beginning of `data` as is possible without waiting. Return the number of bytes."""
        doubtful, nowait = self._doubtful, self._disk.nowait
        self.changes += 1
        try:
            if not self.exists:
                written = self._hold(offset, data)
            elif nowait.writes and (file := self._opened_nowait()) is not None:
                written = self._disk.pwritev(file.number, [data], offset, os.RWF_NOWAIT)
            else:
                return 0
        except OSError as error:
            if error.errno in NOT_OFFERED:
                nowait.writes = False
            elif error.errno != errno.EAGAIN:
                raise self._failed("write", error) from error
            return 0
        finally:
            self.changes += 1
        if written:
            self._filled(offset, offset + written)
            self._written(doubtful, offset, offset + written)
            self.sums.wrote(offset, memoryview(data)[:written])
        return written

    def _hold(self, offset: int, data: bytes | memoryview) -> int:
        """Put all of `data` into the bytes that have no backing file, if there is room. Return the number of bytes."""
        stop = offset + len(data)
        with self._lock:
            old = self._unwritten
            if old is None or self.is_tried or self.is_gone or stop > UNWRITTEN_BYTES or self._opening.locked():
                return 0
            if not self._disk.unwritten.takes(len(old), max(len(old), stop)):
                return 0
            self._unwritten = b"".join((old[:offset].ljust(offset, b"\0"), data, old[stop:]))
        return len(data)

    def close(self) -> None:
        """Drop the descriptor. The next access opens the backing file again."""
        with self._lock:
            self._file = None

    def discard(self) -> None:
        """Remove the bytes for good. A worker may still finish its call, but no reader sees the result."""
        self.size = 0
        self.changes += 1
        with self._lock:
            self.is_gone = True
            file, self._file = self._file, None
            if self._unwritten is not None:
                self._disk.unwritten.takes(len(self._unwritten), 0)
                self._unwritten = b""
        if self.exists:
            self._remove(self.path, file)

    # Methods for workers

    def read_at(self, offset: int, size: int) -> bytes:
        """Read as `pread(2)` does. The result is shorter than `size` only at the end of the file."""
        return bytes(self.read_to(offset, memoryview(bytearray(max(0, min(size, self.size - offset))))))

    def read_to(self, offset: int, room: memoryview, *, keep: bool = True) -> memoryview:
        """Read as `read_at` does, into `room`. Return the filled part of `room`. `keep`: leave the backing file open
        for later calls.
        """
        changes = self.changes  # must be read before the size: see `resize`
        room = room[: max(0, self.size - offset)]
        found = self._pread(offset, room, keep=keep)
        if len(found) < len(room) and self.changes == changes:
            raise SymError(f"backing file {self.path} gave {len(found)} of {len(room)} bytes at offset {offset}")
        return found

    def read_into(self, offset: int, room: memoryview) -> int:
        """Read into `room` as `preadv(2)` does. Return the number of bytes."""
        if offset >= self.size:
            return 0
        if (unwritten := self._unwritten) is not None:
            return len(_copied(unwritten, offset, room))
        try:
            file = self._opened()
            return self._disk.preadv(file.number, [room], offset, 0)
        except OSError as error:
            raise self._failed("read", error) from error

    def verified(self, start: int, room: memoryview) -> Verified:
        """Fill `room` with bytes from `start` on. Compare each extent that begins in these bytes with its sum."""
        wanted = self.sums.expected_in(start, start + len(room))
        return compare(self._pread(start, room[: max(0, self.size - start)]), start, wanted)

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
        """Set the size as `ftruncate(2)` does."""
        before = self.size
        self.size = min(before, size)  # so that no new read expects bytes that will be cut
        self.changes += 1  # shows a read under way that the file has changed
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
        """Reserve room as `posix_fallocate(3)` does."""
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

    def sync(self, opened: Descriptor | None = None) -> None:
        """Sync as `fdatasync(2)` does: when this method returns, all bytes written before are on disk. Raise SymError
        on failure.

        A commit syncs the directory with the name of a new backing file. A failed sync leaves all bytes of the file in
        doubt, because Linux marks pages as clean that it could not write, and the next fdatasync would succeed. So each
        later sync fails until all bytes have been written again, from the first to the last, or cut off.

        `opened`: the result of `begin_writing`.
        """
        with self._syncing:
            seen = self.changes
            if self._doubtful:
                message = f"backing file {self.path} could not be synced, and was not written anew since"
                raise SymError(message, errno.EIO)
            if self._unwritten != b"" and seen != self._synced:  # one look, because a worker may make the backing file
                try:
                    self._sync_now(opened)
                finally:
                    self.is_tried = True
            self._synced = seen

    def _sync_now(self, opened: Descriptor | None) -> None:
        try:
            file = opened or self._opened(keep=False)
        except OSError as error:
            if self.is_gone:
                return
            raise self._failed("sync", error) from error
        try:
            self._disk.fdatasync(file.number)
        except OSError as error:
            self._doubtful = range(self.size)
            raise self._failed("sync", error) from error

    def begin_writing(self) -> Descriptor | None:
        """Begin to write the bytes to the disk, so that a later `sync` takes less time. Return the descriptor; None:
        there is none, and `sync` finds out the reason. Raise SymError if the disk does not take the bytes, because the
        system may not report this to `sync`.
        """
        try:
            file = self._opened(keep=False) if self._unwritten != b"" else None
        except OSError as error:
            log.debug("can't open %s: %s", self.path, error.strerror)
            return None
        if file is not None:
            with self._syncing:
                try:
                    self._disk.begin_writing(file.number)
                except OSError as error:
                    if error.errno not in NOT_OFFERED:
                        self._doubtful, self.is_tried = range(self.size), True
                        raise self._failed("sync", error) from error
        return file

    @property
    def is_dirty(self) -> bool:
        """Whether bytes have changed since the last successful sync began, or a change is under way."""
        return self.changes != self._synced

    def is_synced(self, changes: int) -> bool:
        """Whether the bytes of an earlier time are on disk. `changes`: the count at that time."""
        return self._synced >= changes

    @property
    def sync_failed(self) -> bool:
        """Whether a failed sync may have lost bytes that have not been written again."""
        return bool(self._doubtful)

    # Parts

    def _pread(self, offset: int, room: memoryview, *, keep: bool = True) -> memoryview:
        """Fill `room` as far as the file has bytes. A file that was removed meanwhile has no bytes."""
        if not room:
            return room
        if (unwritten := self._unwritten) is not None:
            return _copied(unwritten, offset, room)
        try:
            file = self._opened(keep=keep)
            return room[: self._disk.pread(file.number, [room], offset)]
        except OSError as error:
            if self.is_gone:
                return room[:0]
            raise self._failed("read", error) from error

    def _filled(self, start: int, stop: int) -> None:
        """Note that a write has filled these bytes."""
        self.gaps.grown(self.size, start)
        self.gaps.written(start, stop)
        self._grown(stop)

    def _grown(self, size: int) -> None:
        """Note that the file has at least `size` bytes, unless its bytes were removed."""
        with self._lock:
            if not self.is_gone:
                self.size = max(self.size, size)

    def _written(self, doubtful: range, start: int, end: int) -> None:
        """Note the bytes of a write. `doubtful`: the bytes in doubt when the write began.

        If a sync has failed since the write began, the sync may have lost the written bytes, so these bytes are in
        doubt, too.
        """
        if doubtful is not self._doubtful:
            self._doubtful = range(max(self._doubtful.stop, end))
        elif doubtful and start <= doubtful.start < end:
            self._doubtful = range(min(end, doubtful.stop), doubtful.stop)

    def _opened(self, *, keep: bool = True) -> Descriptor:
        """Return the descriptor of the backing file, and open the backing file if necessary. `keep`: leave the file
        open for later calls.
        """
        file = self._file
        if file is not None:
            return file
        with self._opening:
            if self._file is not None:
                return self._file
            if self.is_gone:
                raise _removed()
            if not self.exists:
                return self._made(keep=keep)
            made = self._descriptor(0 if self.size else os.O_CREAT)
            if self._inherited_bytes is not None:
                if self._disk.size(made.number) > self._inherited_bytes:
                    self._disk.ftruncate(made.number, self._inherited_bytes)
                self._inherited_bytes = None
            return self._kept(made) if keep else made

    def _opened_nowait(self) -> Descriptor | None:
        """Return the descriptor as `_opened` does if that needs no wait; else return None."""
        nowait = self._disk.nowait
        may_open = nowait.is_local and nowait.opens and self.exists and self._inherited_bytes is None
        if self._file is not None or not may_open:
            return self._file
        try:
            return self._kept(Descriptor(self._removals, self._disk.open_nowait(self.path)))
        except OSError as error:
            nowait.opens = error.errno not in OPENS_NOT_OFFERED
            return None  # a worker finds out the reason

    def _descriptor(self, flags: int) -> Descriptor:
        return Descriptor(self._removals, self._disk.open(self.path, os.O_RDWR | flags))

    def _kept(self, made: Descriptor) -> Descriptor:
        """Keep a descriptor for later calls."""
        with self._lock:
            if self.is_gone:
                raise _removed()
            self._file = made
        return made

    def _made(self, *, keep: bool) -> Descriptor:
        """Make the backing file, and write the bytes that are in memory. Then they leave memory."""
        made = self._descriptor(os.O_CREAT)
        try:
            with self._lock:
                unwritten = self._unwritten  # only `discard` replaces it while `_opening` is locked
            assert unwritten is not None
            offset = 0
            while offset < len(unwritten):
                offset += self._disk.pwritev(made.number, [memoryview(unwritten)[offset:]], offset, 0)
            with self._lock:
                if self.is_gone:
                    raise _removed()
                self._disk.unwritten.takes(len(unwritten), 0)
                self._unwritten = None
                self._file = made if keep else None
                self.is_tried = self.is_tried or keep  # else a sync is under way
        except OSError:
            with suppress(OSError):  # the next worker makes it again
                self._disk.unlink(self.path)
            raise
        return made

    def _failed(self, verb: str, error: OSError) -> SymError:
        code = errno.EIO if error.errno == errno.ENOENT else error.errno  # programs know no backing files
        failure = SymError(f"can't {verb} backing file {self.path}: {error.strerror}", code)
        if error.errno in _ASKED_FOR or self.is_gone:
            log.debug("%s", failure)
        else:
            log.warning("%s", failure)  # the program gets only the error number
        return failure


def _removed() -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "it was removed")


def _copied(unwritten: bytes, offset: int, room: memoryview) -> memoryview:
    """Copy bytes from `offset` on into `room`. Return the filled part of `room`."""
    found = memoryview(unwritten)[offset : offset + len(room)]
    room[: len(found)] = found
    return room[: len(found)]


def sync_all(files: Iterable[PlainFile]) -> dict[PlainFile, SymError]:
    """Sync files as `PlainFile.sync` does. Return the errors of the files that failed. Files whose writing begins
    together share commits of the file system's journal.
    """
    errors, opened = dict[PlainFile, SymError](), dict[PlainFile, Descriptor | None]()
    for each in files:
        try:
            opened[each] = each.begin_writing()
        except SymError as error:
            errors[each] = error
    for each, descriptor in opened.items():
        try:
            each.sync(descriptor)
        except SymError as error:
            errors[each] = error
    return errors
