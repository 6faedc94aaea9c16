"""Log handler that writes to systemd's journal. The subjects of a line become fields, which `journalctl` can search.

    journalctl -u symphony PROGRAM=4711        lines on a program, by the pid of its process
    journalctl -u symphony SYM_USER=1000       lines on a user, by uid
    journalctl -u symphony KV_FILE=/base.kv    lines on a file, by its path below the mount

A logging call names its subjects by `extra={"program": ..., "user": ..., "file": ...}`. A subject is a value, or a list
or tuple of values.
"""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from libsym.errors import NotFound

SOCKET = Path("/run/systemd/journal/socket")
FIELDS = {"program": "PROGRAM", "user": "SYM_USER", "file": "KV_FILE"}
"""Field in the journal for each subject of a line."""
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def subjects(record: logging.LogRecord) -> dict[str, object]:
    """Return the subjects of a line, by their names in `extra`."""
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}


def is_journals(stream: TextIO) -> bool:
    """Return whether a stream leads to the journal. The variable JOURNAL_STREAM identifies the journal's stream."""
    try:
        about = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{about.st_dev}:{about.st_ino}"


class JournalHandler(logging.Handler):
    """Log handler that sends lines to the journal, and reports its own failures on standard error.
    Threads may share it.
    """

    def __init__(self, path: Path = SOCKET) -> None:
        """Open a socket to the journal. NotFound: no journal listens."""
        super().__init__()
        if not path.is_socket():
            raise NotFound(f"no journal listens at {path}: choose another --log, text or json")
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._format = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(entry(record, self._format.format(record)))
        except Exception:  # noqa: BLE001 - as in the library's handlers: a failed line must not end the daemon
            self.handleError(record)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendto(data, self._path)
        except OSError as error:
            if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS):
                raise
            self._send_large(data)

    def _send_large(self, data: bytes) -> None:
        """Send an entry that is too large for a datagram, as a sealed file."""
        memory = os.memfd_create("journal-entry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(memory, "wb") as file:
            file.write(data)
            file.flush()
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))
            self._socket.sendmsg([], [rights], 0, self._path)

    def close(self) -> None:
        self._socket.close()
        super().close()


def entry(record: logging.LogRecord, message: str) -> bytes:
    """Return a line as an entry in the journal's native protocol."""
    return b"".join(_field(name, str(value).encode("utf-8", "replace")) for name, value in _fields(record, message))


def _fields(record: logging.LogRecord, message: str) -> Iterator[tuple[str, object]]:
    yield "MESSAGE", message
    yield "PRIORITY", next((number for level, number in _PRIORITIES if record.levelno >= level), _DEBUG)
    yield "SYSLOG_IDENTIFIER", "symphony"
    yield "LOGGER", record.name
    yield "CODE_FILE", record.pathname
    yield "CODE_LINE", record.lineno
    for name, value in subjects(record).items():
        for each in value if isinstance(value, list | tuple) else [value]:
            yield FIELDS[name], each


def _field(name: str, value: bytes) -> bytes:
    """Return a field of an entry. The length precedes a value of several lines."""
    if b"\n" not in value:
        return b"%s=%s\n" % (name.encode(), value)
    return b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(value)), value)
