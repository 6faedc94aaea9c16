"""A plain file's bytes: a backing file, made when the first byte is written.

The size is kept here, so that `stat` asks nobody. The kernel serialises writes and truncations of one inode, so the
owner's thread and its workers never change one file at the same time. A worker may read while it is changed, though:
it gets bytes from before or after, and fewer where the file was cut.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

from libsym.errors import SymError

log = logging.getLogger(__name__)

_LARGE_BYTES = 4 << 20
"""Freeing more than that takes the file system below a millisecond or so: 270 MB took 12 to 40 ms."""


_ASKED_FOR = frozenset({errno.EFBIG, errno.EINVAL, errno.EOPNOTSUPP})
"""Errors that come from what was asked for, and not from the disk below."""


class _Descriptor:
    """An open file, closed when the last user lets go of it: perhaps a worker in the middle of a read."""

    __slots__ = ("number",)

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class PlainFile:
    """The content of a plain file; satisfies `ByteSource`, so an image in it can be imported."""

    __slots__ = ("_directory", "_exists", "_file", "_is_gone", "_lock", "_name", "changes", "charged", "size")

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self.size = 0
        self.charged = 0
        """Bytes that somebody is charged for: its size, except while it is being written or imported."""
        self.changes = 0
        """Counts writes and truncations: equal counts mean equal bytes."""
        self._file: _Descriptor | None = None
        self._exists = False
        """Whether there may be a backing file."""
        self._is_gone = False
        """Whether the bytes were removed for good: no backing file must be made again."""
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        return self._directory / self._name

    def read_at(self, offset: int, size: int) -> bytes:
        """As `pread(2)`: fewer bytes only at the end."""
        changes = self.changes  # before the size: see `resize`
        wanted = min(size, self.size - offset)
        if wanted <= 0:
            return b""
        try:
            file = self._opened()
            data = os.pread(file.number, wanted, offset)
        except OSError as error:
            if self._is_gone:
                return b""
            raise self._failed("read", error) from error
        if len(data) != wanted and self.changes == changes:
            raise SymError(f"backing file {self.path} gave {len(data)} of {wanted} bytes at offset {offset}")
        return data

    def read_into(self, offset: int, room: memoryview) -> int:
        """As `preadv(2)`: the bytes there are, straight to where they are to be."""
        try:
            return os.preadv(self._opened().number, [room], offset) if offset < self.size else 0
        except OSError as error:
            raise self._failed("read", error) from error

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data`, or raise."""
        view = memoryview(data)
        self.changes += 1
        try:
            file = self._opened()
            while view:
                written = os.pwrite(file.number, view, offset)
                offset += written
                self.size = max(self.size, offset)
                view = view[written:]
        except OSError as error:
            raise self._failed("write", error) from error

    def resize(self, size: int) -> None:
        """As `ftruncate(2)`."""
        before = self.size
        self.size = min(before, size)  # no read begins that expects what will be cut, and one that has begun
        self.changes += 1  # sees that something changed
        if size or before:
            try:
                file = self._opened()
                os.ftruncate(file.number, size)
            except OSError as error:
                self.size = before
                raise self._failed("resize", error) from error
        self.size = size

    def allocate(self, offset: int, size: int) -> None:
        """As `posix_fallocate(3)`."""
        self.changes += 1
        try:
            os.posix_fallocate(self._opened().number, offset, size)
        except OSError as error:
            raise self._failed("allocate", error) from error
        self.size = max(self.size, offset + size)

    def close(self) -> None:
        """Give the descriptor back; the next access opens the file again."""
        self._file = None

    def discard(self) -> None:
        """Remove the bytes for good."""
        last = self._kept_open() if self._exists and self.size > _LARGE_BYTES else []
        self.size = 0
        self.changes += 1
        with self._lock:
            self._is_gone = True
            self._file = None
        if self._exists:
            self._exists = False
            self.path.unlink(missing_ok=True)
        if last:
            threading.Thread(target=last.clear, name="discard").start()

    def _kept_open(self) -> list[_Descriptor]:
        """The open file, for a thread to close last: freeing its blocks takes a while."""
        try:
            return [self._opened()]
        except OSError:  # no descriptor left: then the blocks are freed at once
            return []

    def _opened(self) -> _Descriptor:
        with self._lock:
            if self._file is None:
                if self._is_gone:
                    raise FileNotFoundError(errno.ENOENT, "it was removed")
                self._exists = True
                self._file = _Descriptor(self.path)
            return self._file

    def _failed(self, verb: str, error: OSError) -> SymError:
        failure = SymError(f"can't {verb} backing file {self.path}: {error.strerror}", error.errno)
        if error.errno in _ASKED_FOR:
            log.debug("%s", failure)
        else:
            log.warning("%s", failure)  # whoever made the request gets no more than the number
        return failure
