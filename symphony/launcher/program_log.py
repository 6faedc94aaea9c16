"""What a program wrote: on disk first, and whoever looks on reads it from there, each at its own pace.

A log is one file of records (`log`: bytes, stream, time), and the one before it (`log.1`). When `log` is full it
becomes `log.1`, and the `log.1` of before goes: so the last one to two SEGMENT_BYTES are kept. A reader has the file
that it is in open, and loses nothing as long as it is in one of the two. Readers that must not lose anything (a
terminal that the program runs on) keep the log from going on without them, and so the program waits, as at the end of
any pipe.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from pathlib import Path

SEGMENT_BYTES = 1 << 20
"""The launcher's directory is often in memory."""
LEFT_OUT = b"\nsymphony: output was left out here: the program wrote faster than it was read\n"
_RECORD = struct.Struct("<I4xcxxxxxxxd")
"""Number of bytes, stream (`O` or `E`), seconds of the epoch."""


class ProgramLog:
    """The writing end, and the readers that it waits for."""

    def __init__(self, directory: Path) -> None:
        self._path, self._before = directory / "log", directory / "log.1"
        self.generation = 0
        """Of the file that is written to."""
        self._file = -1
        self.size = 0
        """Bytes of it."""
        self.patient: set[LogReader] = set()
        """Readers that nothing is to be taken from."""

    @property
    def must_wait(self) -> bool:
        """Writing on would take from a reader what it has not read."""
        return self.size >= SEGMENT_BYTES and any(each.generation < self.generation for each in self.patient)

    def append(self, stream: bytes, content: bytes) -> None:
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self.size = os.fstat(self._file).st_size
        elif self.size >= SEGMENT_BYTES:
            self._begin_another()
        record = _RECORD.pack(len(content), stream, time.time()) + content
        if os.write(self._file, record) < len(record):
            os.ftruncate(self._file, self.size)  # half a record would be read as what it is not
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += len(record)

    def _begin_another(self) -> None:
        os.close(self._file)
        self._path.replace(self._before)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.generation += 1
        self.size = 0

    def open(self, generation: int) -> int:
        """A descriptor of one of the two files. FileNotFoundError: it has gone, or never was."""
        if generation not in (self.generation, self.generation - 1):
            raise FileNotFoundError
        return os.open(self._path if generation == self.generation else self._before, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class LogReader:
    """Reads a log from its oldest record on, or from now on, and waits at its end."""

    def __init__(self, log: ProgramLog, *, from_now: bool = False) -> None:
        self._log = log
        self._file = -1
        self.generation = log.generation
        self._offset = log.size if from_now else 0
        self._taken = 0
        """Bytes of the record at `_offset` that were read."""
        if not from_now:
            self._go_to_oldest()

    def read(self, most: int) -> tuple[bytes, bytes] | None:
        """The next stretch of one stream, `most` bytes at most, of one record; None: that was all so far."""
        while True:
            if self._file < 0 and not self._open():
                return None
            if self._file < 0:
                return b"E", LEFT_OUT
            head = os.pread(self._file, _RECORD.size, self._offset)
            if len(head) == _RECORD.size:
                break
            if self.generation >= self._log.generation:
                return None
            self._go_on()
        size, stream, _ = _RECORD.unpack(head)
        begin = self._offset + _RECORD.size + self._taken
        content = os.pread(self._file, min(size - self._taken, most), begin)
        self._taken += len(content)
        if self._taken >= size:
            self._offset += _RECORD.size + size
            self._taken = 0
        return stream, content

    def _open(self) -> bool:
        try:
            self._file = self._log.open(self.generation)
        except FileNotFoundError:
            if self.generation >= self._log.generation:
                return False  # nothing was written yet
            self._go_to_oldest()
        return True

    def _go_on(self) -> None:
        self.close()
        self.generation += 1
        self._offset = self._taken = 0

    def _go_to_oldest(self) -> None:
        self.close()
        self._offset = self._taken = 0
        self.generation = self._log.generation
        try:
            os.close(self._log.open(self.generation - 1))
        except FileNotFoundError:
            return
        self.generation -= 1

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
