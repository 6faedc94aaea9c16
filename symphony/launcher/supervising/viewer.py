"""Viewer: a client that watches one program. A viewer gets the log at its own pace, and may send input and signals."""

from __future__ import annotations

import asyncio
import enum
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from symphony.launcher.common import wire
from symphony.launcher.common.places import Refused
from symphony.launcher.supervising.program import LaunchedProgram
from symphony.launcher.supervising.program_log import LogReader
from symphony.launcher.supervising.supervisor import Supervisor

_CHUNKS_AT_ONCE = 16
"""Number of messages that are sent in a row before other clients are served."""


class Role(enum.Enum):
    """Role of a viewer, named by its command. The role decides how the client may affect the program."""

    OWNER = "run"
    """Client whose terminal or pipes the program uses. If the client leaves without detaching, the launcher hangs up
    the program.
    """
    GUEST = "attach"
    """Client that may leave at any time. Such a client gets the output from its arrival on, and may send input."""
    FOLLOWER = "logs -f"
    READER = "logs"


class Viewer:
    """A program's viewer: one client. Owner and guest lose no output, since the program waits for them."""

    def __init__(
        self,
        supervisor: Supervisor,
        program: LaunchedProgram,
        connection: socket.socket,
        on_end: Callable[[], None],
        role: Role,
    ) -> None:
        self._supervisor = supervisor
        self._program = program
        self._connection = connection
        self._on_end = on_end
        self._role = role
        self._loop = asyncio.get_running_loop()
        self._reader = LogReader(program.log, from_now=role is Role.GUEST)
        self._generation = self._reader.generation
        self._unsent: bytes | None = None
        self._is_closed = False
        self._was_detached = False
        self._acts = role in (Role.OWNER, Role.GUEST)
        if self._acts:
            program.log.patient.add(self._reader)
        program.on_change.add(self.show)

    def show(self) -> None:
        """Send new output, as much as the client's socket accepts."""
        for _ in range(_CHUNKS_AT_ONCE):
            if self._is_closed:
                return
            message = self._unsent or self._next()
            if message is None:
                self._at_end()
                return
            if not self._sent(message):
                return
        self._loop.call_soon(self.show)

    def _next(self) -> bytes | None:
        found = self._reader.read(wire.CHUNK_BYTES)
        if self._reader.generation != self._generation:
            self._generation = self._reader.generation
            if self._program.streams is not None:
                self._program.streams.go_on()
        return None if found is None else b"".join(found)

    def _sent(self, message: bytes) -> bool:
        try:
            self._connection.send(message)
        except BlockingIOError:
            self._unsent = message
            self._loop.add_writer(self._connection, self.show)
            return False
        except OSError:
            self._on_end()
            return False
        if self._unsent is not None:
            self._unsent = None
            self._loop.remove_writer(self._connection)
        return True

    def _at_end(self) -> None:
        if self._role is Role.READER or self._program.over.is_set():
            self._tell({"event": "ended", **self._program.record.shown()})
            self._on_end()

    def take(self, kind: bytes, content: Any) -> None:
        """Handle a message of the client: input or a command. Only owner and guest may send messages."""
        if not self._acts:
            return
        if kind == wire.INPUT:
            self._input(content)
        elif kind == wire.JSON:
            with suppress(Refused, KeyError, TypeError, ValueError):  # the program has ended, or the command is invalid
                self._command(content)

    def _input(self, content: bytes) -> None:
        streams = self._program.streams
        if content and streams is not None:
            streams.give(content, lambda: self._tell({"event": "more"}))
        elif content:
            self._tell({"event": "more"})
        elif streams is not None and self._role is Role.OWNER:
            self._program.input_ended = True
            streams.end_input()

    def _command(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "signal":
                self._supervisor.kill(self._program, command["signal"])
            case "resize":
                rows, columns = command["window"]
                self._program.window = rows, columns  # a restarted process gets this size, too
                if self._program.streams is not None:
                    self._program.streams.resize(rows, columns)
            case "detach":
                self._was_detached = True
                self._on_end()

    def _tell(self, message: dict[str, Any]) -> None:
        if not self._is_closed:
            with suppress(OSError):  # the client is gone, or does not read; then it will be closed
                wire.send(self._connection, message)

    def close(self) -> None:
        """Stop sending, before the connection is closed. If an owner closes without detaching, hang the program up."""
        self._is_closed = True
        self._program.on_change.discard(self.show)
        self._program.log.patient.discard(self._reader)
        self._reader.close()
        if self._program.streams is not None:
            self._program.streams.go_on()
        if self._role is Role.OWNER and not self._was_detached and not self._program.over.is_set():
            self._supervisor.hang_up(self._program)
