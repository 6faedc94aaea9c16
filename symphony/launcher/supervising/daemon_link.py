"""The launcher's connection to its daemon's programs socket. While programs run, a lost connection is made again.

Messages are JSON. A request of the launcher has a serial number `n`, which the answer repeats. A request of the daemon
has a serial number `d`. Connections that programs made are passed on to the daemon as descriptors.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from symphony.launcher.common.places import Refused
from symphony.launcher.machine.last_close import Closer

log = logging.getLogger(__name__)

PROTOCOL = 1
"""Version of these messages, as in `scheduler/doors/launchers.py`. The daemon may be older, or newer."""
ANSWER_TIMEOUT_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
_MAX_BYTES = 64 << 10

Message = dict[str, Any]
_Passed = tuple[socket.socket, Closer]
"""A program's connection, and the Closer for the launcher's descriptor of it.

If the daemon has closed its descriptor already, the launcher's close is the last close, which may take long.
"""


class NoDaemon(Refused):
    """Error: the daemon is missing, or accepts no launchers."""


class DaemonLink:
    """Link to the daemon. `on_again` is called after a reconnect, since the daemon does not know this launcher's
    programs.

    `on_request` gets the requests of the daemon. `is_needed` returns whether to reconnect when the connection is lost.
    """

    def __init__(
        self,
        path: str,
        on_again: Callable[[], None],
        on_request: Callable[[Message], None],
        is_needed: Callable[[], bool],
    ) -> None:
        self._path = path
        self._on_again, self._on_request, self._is_needed = on_again, on_request, is_needed
        self._loop = asyncio.get_running_loop()
        self._connection: socket.socket | None = None
        self._last_number = 0
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._unsent: deque[tuple[bytes, _Passed | None]] = deque()
        self._connecting: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def connect(self) -> None:
        """Connect to the daemon, unless there is a connection already. NoDaemon: no daemon listens at the path."""
        if self._connection is not None:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            raise NoDaemon(f"no daemon takes launchers at {self._path}: {error.strerror or error}") from None
        self._connection = connection
        self._loop.add_reader(connection, self._receive)

    async def call(self, do: str, **words: Any) -> Message:
        """Send a request, and return the answer. Refused: the daemon refuses; the error has the daemon's message."""
        self.connect()
        number = self._last_number = self._last_number + 1
        answer = self._answers[number] = self._loop.create_future()
        self._post({"n": number, "do": do, **words})
        try:
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise NoDaemon(f"the daemon at {self._path} does not answer: is it stopped or overloaded?") from None
        finally:
            self._answers.pop(number, None)

    def pass_on(self, program: str, connection: socket.socket, closer: Closer) -> None:
        """Hand the daemon a connection that `program` made. Without a daemon, close the connection."""
        if self._connection is None:
            closer.close(connection)
            return
        self._last_number += 1
        self._post({"n": self._last_number, "do": "connect", "id": program}, (connection, closer))

    def answer(self, request: Message, **words: Any) -> None:
        """Answer a request of the daemon. If the daemon is gone, the answer is dropped."""
        if self._connection is not None:
            self._post({"d": request["d"], **words})

    def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        self._hang_up()

    def _post(self, message: Message, passed: _Passed | None = None) -> None:
        raw = json.dumps(message).encode()
        if len(raw) > _MAX_BYTES:
            raise Refused("the message to the daemon is too long")
        self._unsent.append((raw, passed))
        self._send()

    def _send(self) -> None:
        while self._unsent and self._connection is not None:
            raw, passed = self._unsent[0]
            rights = [] if passed is None else _rights(passed[0])
            try:
                self._connection.sendmsg([raw], rights)
            except BlockingIOError:
                self._loop.add_writer(self._connection, self._send)
                return
            except OSError:
                self._lost()
                return
            self._unsent.popleft()
            _close(passed)
        if self._connection is not None:
            self._loop.remove_writer(self._connection)

    def _receive(self) -> None:
        if self._connection is None:
            return
        try:
            raw = self._connection.recv(_MAX_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            raw = b""
        if not raw:
            self._lost()
            return
        message = json.loads(raw)
        if "n" in message:
            self._answered(message)
        else:
            self._on_request(message)

    def _answered(self, message: Message) -> None:
        answer = self._answers.pop(message["n"], None)
        if answer is None or answer.done():
            return
        if "error" in message:
            answer.set_exception(Refused(message["error"]))
        else:
            answer.set_result(message)

    def _lost(self) -> None:
        log.warning("the daemon at %s has gone", self._path)
        self._hang_up()
        if self._connecting is None or self._connecting.done():
            self._connecting = self._loop.create_task(self._connect_again())

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()
            self._connection = None
        for _, passed in self._unsent:
            _close(passed)
        self._unsent.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(NoDaemon(f"the daemon at {self._path} went away"))
        self._answers.clear()

    async def _connect_again(self) -> None:
        pause_s = FIRST_PAUSE_S
        while self._is_needed():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            with suppress(NoDaemon):
                self.connect()
                log.info("the daemon at %s is there again", self._path)
                self._on_again()
                return


def _rights(connection: socket.socket) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [connection.fileno()]))]


def _close(passed: _Passed | None) -> None:
    if passed is not None:
        connection, closer = passed
        closer.close(connection)
