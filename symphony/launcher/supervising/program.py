"""A launcher's state of a program, and the program's record on disk."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symphony.launcher.common.places import Refused
from symphony.launcher.common.spec import Spec
from symphony.launcher.common.wire import ERROR
from symphony.launcher.machine.cgroup import Group
from symphony.launcher.machine.last_close import Closer, refuse_descriptors
from symphony.launcher.network.forwarder import Forwarder
from symphony.launcher.supervising.process import ProgramProcess
from symphony.launcher.supervising.program_log import ProgramLog
from symphony.launcher.supervising.streams import Streams

log = logging.getLogger(__name__)

BACKLOG = 128
ACCEPT_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class End:
    """End of a program: exit status, reason and time."""

    status: int
    reason: str
    at: float


@dataclass(slots=True)
class Record:
    """Facts about a program that state.json keeps."""

    id: str
    name: str
    program: str
    args: list[str]
    cwd: str
    uid: int
    parent: str | None
    detached: bool
    """Whether the program outlives its parent."""
    tty: bool
    limits: dict[str, Any]
    created: float
    isolation: str
    pid: int | None = None
    started: float | None = None
    restarts: int = 0
    end: End | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: Spec, name: str, parent: str | None, *, outlives: bool) -> Record:
        return cls(
            id=spec.id or secrets.token_hex(4),
            name=name,
            program=spec.path,
            args=list(spec.args),
            cwd=spec.cwd,
            uid=os.getuid(),
            parent=parent,
            detached=outlives,
            tty=spec.tty,
            limits={key: limit for key, limit in dataclasses.asdict(spec.limits).items() if limit is not None},
            created=time.time(),
            isolation=spec.isolation,
        )

    @classmethod
    def read(cls, path: Path) -> Record:
        words = json.loads(path.read_text(encoding="utf-8"))
        words["end"] = End(**words["end"]) if words["end"] else None
        return cls(**words)

    def write(self, path: Path) -> None:
        """Write the record to a new file, and rename the file to `path`."""
        new = path.with_suffix(".new")
        end = self.end and dataclasses.asdict(self.end)
        new.write_text(json.dumps({**self._words(), "end": end}), encoding="utf-8")
        new.replace(path)

    def shown(self) -> dict[str, Any]:
        """Return the facts for clients."""
        words, end = self._words(), self.end
        if end is None:
            return {**words, "status": None, "reason": None, "ended": None}
        return {**words, "status": end.status, "reason": end.reason, "ended": end.at}

    def _words(self) -> dict[str, Any]:
        """Return all fields except the end, without copying values."""
        return {name: getattr(self, name) for name in _WORDS}


_WORDS = [each.name for each in dataclasses.fields(Record) if each.name != "end"]


class LaunchedProgram:
    """Program that runs, or that has ended and is kept for its log and status."""

    def __init__(self, directory: Path, record: Record, spec: Spec | None, window: tuple[int, int] = (24, 80)) -> None:
        """`window`: initial rows and columns of the program's terminal."""
        self.record = record
        self.directory = directory
        self._spec = spec
        self.window = window
        self.log = ProgramLog(directory)
        self.streams: Streams | None = None
        self.process: ProgramProcess | None = None
        """Process of the program's latest start. None: the program has not started yet, or waits for a restart."""
        self.forwarder: Forwarder | None = None
        """Forwarder to the hosts of the grants. None: the program has no grants, or does not run."""
        self.group: Group | None = None
        self.input_ended = False
        """Whether the input has ended. After a restart, the input stays ended."""
        self.limit: str | None = None
        """Limit that the program exceeded, or None."""
        self.stopping = asyncio.Event()
        """Set when the program is being ended, and must not be restarted."""
        self.over = asyncio.Event()
        """Set when the program has ended, and its log has all of its output."""
        self.on_change: set[Callable[[], None]] = set()
        """Callbacks that are called when the log has grown, or when the program has ended."""
        self.closer = Closer()
        self._listening: socket.socket | None = None
        if record.end is not None:
            self.over.set()

    @property
    def spec(self) -> Spec:
        assert self._spec is not None, "a program of an earlier launcher is never started"
        return self._spec

    @property
    def socket_path(self) -> Path:
        """Path of the socket to which the program connects."""
        return self.directory / "socket"

    def save(self) -> None:
        try:
            self.record.write(self.directory / "state.json")
        except OSError as error:  # a full disk must not end the program
            log.warning("the state of %s can't be saved: %s", self.record.name, error.strerror)

    def say(self, text: str) -> None:
        """Append a line from the launcher to the program's log, in the stream of standard error."""
        try:
            self.log.append(ERROR, f"symphony: {text}\n".encode())
        except OSError as error:
            log.warning("its log can't be written (%s): %s", error.strerror, text)

    def listen(self, on_connection: Callable[[LaunchedProgram, socket.socket], None]) -> None:
        """Make the program's directory and socket, and listen. Refused: the directory or socket can't be made."""
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.setblocking(False)
        try:
            self.directory.mkdir(mode=0o700, parents=True)
            self._listening.bind(str(self.socket_path))
        except OSError as error:  # for a path that is too long, Python raises OSError without an errno
            raise Refused(f"the program's socket {self.socket_path} can't be made: {error.strerror or error}") from None
        refuse_descriptors(self._listening)
        self._listening.listen(BACKLOG)
        self._accept_from_now(on_connection)

    def _accept_from_now(self, on_connection: Callable[[LaunchedProgram, socket.socket], None]) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening, self._accept, on_connection)

    def _accept(self, on_connection: Callable[[LaunchedProgram, socket.socket], None]) -> None:
        assert self._listening is not None
        if not self.closer.has_room:
            self._pause(on_connection)
            return
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors or memory: the connection waits in the queue
            log.warning("a connection of %s can't be accepted: %s", self.record.name, error.strerror)
            self._pause(on_connection)
            return
        on_connection(self, connection)

    def _pause(self, on_connection: Callable[[LaunchedProgram, socket.socket], None]) -> None:
        assert self._listening is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)
        loop.call_later(ACCEPT_AGAIN_S, self._accept_from_now, on_connection)

    def stop_listening(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self.closer.close(self._listening)
            self._listening = None
            self.socket_path.unlink(missing_ok=True)

    def changed(self) -> None:
        for tell in list(self.on_change):
            tell()

    def forget(self) -> None:
        """Remove the program's directory."""
        self.log.close()
        shutil.rmtree(self.directory)
