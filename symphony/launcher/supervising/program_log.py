"""Log of a program's output, on disk. Each client reads the log at a pace of its own.

A log has up to two files of records (bytes, stream, time). When `log` is full, it is renamed to `log.1`, and the old
`log.1` is removed. So a log keeps one to two SEGMENT_BYTES of the latest output. A reader keeps its current file open,
and loses no output as long as that file is one of the two. A patient reader (such as the terminal that the program runs
on) must not lose output. While a patient reader lags behind, the log is not written, and the program blocks, as at a
full pipe.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from pathlib import Path

SEGMENT_BYTES = 1 << 20
"""Size of a full file. The size is small, since the launcher's directory is often in memory."""
LEFT_OUT = b"\nsymphony: output was left out here: the log keeps the last one to two MiB\n"
_RECORD = struct.Struct("<I4xcxxxxxxxd")
"""Header of a record: number of bytes, stream (`O` or `E`), and time in seconds since the epoch."""


class ProgramLog:
    """Writer of a log. The writer knows the patient readers, and waits for them."""

    def __init__(self, directory: Path) -> None:
        self._path, self._before = directory / "log", directory / "log.1"
        self.generation = 0
        """Serial number of the file that is being written."""
        self._file = -1
        self.size = 0
        """Size of the file that is being written, in bytes."""
        self.patient: set[LogReader] = set()
        """Readers that must not lose any output."""

    @property
    def must_wait(self) -> bool:
        """Whether the next write could remove output that a patient reader has not read."""
        return self.size >= SEGMENT_BYTES and any(each.generation < self.generation for each in self.patient)

    def append(self, stream: bytes, content: bytes) -> None:
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self.size = os.fstat(self._file).st_size
        elif self.size >= SEGMENT_BYTES:
            self._begin_another()
        record = _RECORD.pack(len(content), stream, time.time()) + content
        if os.write(self._file, record) < len(record):
            os.ftruncate(self._file, self.size)  # a reader would misread half a record
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += len(record)

    def _begin_another(self) -> None:
        os.close(self._file)
        self._path.replace(self._before)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.generation += 1
        self.size = 0

    def open(self, generation: int) -> int:
        """Open one of the two files. FileNotFoundError: this file has been removed, or was never written."""
        if generation not in (self.generation, self.generation - 1):
            raise FileNotFoundError
        return os.open(self._path if generation == self.generation else self._before, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class LogReader:
    """Reader of a log, from its oldest record on, or from its present end on."""

    def __init__(self, log: ProgramLog, *, from_now: bool = False) -> None:
        self._log = log
        self._file = -1
        self.generation = log.generation
        self._offset = log.size if from_now else 0
        self._taken = 0
        """Number of bytes of the record at `_offset` that were read already."""
        if not from_now:
            self._go_to_oldest()
        self._has_missed = not from_now and self.generation > 0
        """Whether files were removed before this reader came, and the reader has not told it yet."""

    def read(self, most: int) -> tuple[bytes, bytes] | None:
        """Return a stream and its next bytes: up to `most` bytes of one record.
        None: the reader is at the log's end.
        """
        if self._has_missed:
            self._has_missed = False
            return b"E", LEFT_OUT
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
