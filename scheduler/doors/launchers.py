"""The programs socket: launchers register their programs, and pass on the programs' connections.

A launcher is a process of one user, with one connection of packets for all its programs. A packet is a JSON object,
with at most one descriptor. A launcher may manage only its own programs. The daemon learns from the kernel which user a
launcher belongs to. The daemon serves a connection that a launcher passes on as if it had accepted the connection
itself, and learns from the kernel which user the program belongs to. This must be the launcher's user, unless the
launcher belongs to root.

A launcher lives as long as its programs, so it outlives a daemon that is upgraded. The request `start` has the newest
version of these messages that the launcher speaks (PROTOCOL). A `start` without a version means version 1. The answer
has the version that both sides speak. Each side skips fields that it does not know.

A launcher cannot harm other users. `peer_socket.py` handles descriptors from launchers. A packet that is not a
request ends the launcher's connection. A flood of requests waits in the launcher's own socket, because the daemon takes
its requests one by one. The daemon takes no requests from a launcher that does not read answers. If the connection of a
launcher ends, its programs and their connections live on. The launcher connects again, and names its programs.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

import trio

from libsym.errors import Invalid, NotPermitted, ProtocolError, SymError
from scheduler.connection.places import Places
from scheduler.programs.limits import ProgramLimits
from scheduler.programs.link import MAX_MESSAGE_BYTES, Link
from scheduler.programs.program import Program
from scheduler.programs.registry import Programs
from scheduler.wire.payloads import bounded_json
from scheduler.wire.peer_socket import PeerSocket, Threads
from scheduler.wire.peers import accept_for_ever, peer_credentials

log = logging.getLogger(__name__)

PROTOCOL, OLDEST_PROTOCOL = 1, 1
"""The newest and the oldest version of the messages that the daemon speaks."""
MAX_LAUNCHERS = 256
"""Maximum number of connected launchers. One user has one launcher."""
MAX_NAME = 64
MAX_TEXTS, MAX_OTHER_BYTES = 64, 1024
"""Bounds of one message. Launchers send short messages."""
MAX_PID = 1 << 22
READ_WITHIN_S = 30.0
"""Time after which the daemon drops a launcher that does not read its messages."""
_REASONS = ("exit", "signal", "time", "memory", "tokens", "pages", "page_seconds", "processes", "killed", "restart")
_IDS = frozenset("0123456789abcdef")

Adopt = Callable[[socket.socket, Program], None]
Passed = list[int] | SymError
"""A list with the connection that arrived with a request, or the error that says why no connection arrived. A handler
that keeps the connection empties the list.
"""
_NONE_CAME = "a connection is passed on with its descriptor, and none came"
_UNFIT = "what was passed on is no connection of a Unix socket for streams"


class Launchers:
    """Accepts launchers, and serves each until one side closes the connection."""

    def __init__(
        self,
        programs: Programs,
        adopt: Adopt,
        exempt: frozenset[int] = frozenset(),
        house: dict[str, Any] | None = None,
        threads: Threads | None = None,
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the registry of programs, and `adopt`, which serves a passed connection.

        `house` has the facts that `start` returns: see `_Requests`. `threads` close descriptors whose close may hang.
        `catch_up` brings the programs' usage up to date.
        """
        self._programs = programs
        self._catch_up = catch_up
        self._house = house or {}
        self._adopt = adopt
        self._threads = threads or Threads()
        self._places = Places(MAX_LAUNCHERS, "launchers", exempt)
        self.num_connected = 0

    async def run(self, listening: trio.socket.SocketType) -> None:
        """Accept launchers for ever."""
        async with trio.open_nursery() as nursery:
            await accept_for_ever(
                listening,
                "launcher",
                lambda connection: nursery.start_soon(self._serve, PeerSocket(connection, self._threads)),
            )

    async def _serve(self, connection: PeerSocket) -> None:
        """Serve a launcher. Its failures do not affect other launchers."""
        subject: dict[str, object] = {}
        with connection:
            try:
                pid, credentials = peer_credentials(connection.socket)
                subject = {"program": pid, "user": credentials.uid}
                with self._places.one_for(credentials.uid):
                    await self._serve_link(connection, Link(credentials.uid, credentials.gid))
            except* ConnectionError as errors:
                log.debug("launcher gone: %s", errors.exceptions[0], extra=subject)
            except* SymError as errors:
                log.warning("launcher dropped: %s", errors.exceptions[0], extra=subject)
            except* Exception:
                log.exception("launcher dropped", extra=subject)

    async def _serve_link(self, connection: PeerSocket, link: Link) -> None:
        self.num_connected += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send, connection, link)
                nursery.start_soon(_break_off, link)
                await self._receive(connection, link)
                nursery.cancel_scope.cancel()
        finally:
            self.num_connected -= 1
            link.close()
            self._programs.launcher_gone(link)

    async def _receive(self, connection: PeerSocket, link: Link) -> None:
        requests = _Requests(self._programs, self._adopt, link, self._house, self._catch_up)
        while True:
            await link.has_room()
            found = await connection.receive_descriptors(MAX_MESSAGE_BYTES + 1)
            fds = list(found.fds)
            try:
                if not found.data:
                    return
                is_cut = found.flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
                if is_cut or len(found.data) > MAX_MESSAGE_BYTES or found.num_descriptors > 1:
                    raise ProtocolError(f"a message with over {MAX_MESSAGE_BYTES} bytes, or over one descriptor")
                passed = fds or Invalid(_UNFIT if found.num_descriptors else _NONE_CAME)
                answer = requests.take(found.data, passed)
            finally:
                connection.dispose(fds)
            if answer is not None:
                link.tell(answer)
            await trio.lowlevel.checkpoint()


class _Requests:
    """Requests of one launcher. The answer to a wrong request is its error. A packet that is no request is a
    ProtocolError.
    """

    def __init__(
        self, programs: Programs, adopt: Adopt, link: Link, house: dict[str, Any], catch_up: Callable[[], None]
    ) -> None:
        """Take the link to the launcher.

        `house` has `mount`, the directory of KV, and `hidden`, paths of the daemon that programs must not see.
        """
        self._house, self._catch_up = house, catch_up
        self._programs = programs
        self._adopt = adopt
        self._link = link
        self._begin: dict[str, Callable[[dict[str, Any], Passed], dict[str, Any]]] = {
            "start": self._start,
            "pid": self._pid,
            "connect": self._connect,
            "limit": self._limit,
            "end": self._end,
        }

    def take(self, data: bytes, passed: Passed) -> dict[str, Any] | None:
        """Take a packet, and return the answer to its request. None: the packet answers a request of the daemon."""
        try:
            found = bounded_json("the daemon", data, max_texts=MAX_TEXTS, max_other_bytes=MAX_OTHER_BYTES)
        except Invalid as error:
            raise ProtocolError(str(error)) from None
        if not isinstance(found, dict):
            raise ProtocolError("a message of a launcher is a JSON object")
        if "d" in found:
            self._answered(found)
            return None
        number = found.pop("n", None)
        if not isinstance(number, int):
            raise ProtocolError("a launcher's request has a number n")
        try:
            do = found.pop("do", None)
            begin = self._begin.get(do) if isinstance(do, str) else None
            if begin is None:
                raise Invalid(f"there is no request {str(do)[:60]!r}: {', '.join(self._begin)}")
            return {"n": number, "ok": True, **begin(found, passed)}
        except SymError as error:
            return {"n": number, "error": str(error), "errno": error.errno}

    def _answered(self, found: dict[str, Any]) -> None:
        number, error, code = found.pop("d"), found.get("error"), found.get("errno", errno.EIO)
        if not isinstance(number, int):
            raise ProtocolError("the number of an answer is no number")
        if error is not None:
            code = code if isinstance(code, int) and 0 < code < 4096 else errno.EIO
            self._link.answered(number, SymError(str(error), code))
        else:
            self._link.answered(number, found)  # ignored if the asking call has given up

    def _start(self, found: dict[str, Any], _passed: Passed) -> dict[str, Any]:
        protocol = _protocol(found.get("protocol", 1))
        pid, parent = found.get("pid"), found.get("parent")
        self._programs.start(
            self._link,
            _id(found.get("id")),
            _name(found.get("name")),
            pid=None if pid is None else _pid(pid),
            parent=None if parent is None else _id(parent),
            limits=ProgramLimits.read(found.get("limits")),
            again=found.get("again") is True,
        )
        return {**self._house, "protocol": protocol}

    def _pid(self, found: dict[str, Any], _passed: Passed) -> dict[str, Any]:
        self._programs.has_pid(self._program(found), _pid(found.get("pid")))
        return {}

    def _connect(self, found: dict[str, Any], passed: Passed) -> dict[str, Any]:
        program = self._program(found)
        if isinstance(passed, SymError):
            raise passed
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=passed[0])
        try:
            self._check_peer(connection)
        except BaseException:
            connection.detach()
            raise
        passed.clear()
        self._adopt(connection, program)
        return {}

    def _check_peer(self, connection: socket.socket) -> None:
        """Raise NotPermitted for a connection of another user, unless the launcher is root's."""
        uid = peer_credentials(connection)[1].uid
        if self._link.uid not in (0, uid):
            raise NotPermitted(f"uid {self._link.uid} can't pass on a connection of uid {uid}")

    def _limit(self, found: dict[str, Any], _passed: Passed) -> dict[str, Any]:
        """Return the limit that a program has reached, if any.

        A program may end because of the limit before the launcher is told.
        """
        over = self._program(found).over
        return {"what": None if over is None else over.what}

    def _end(self, found: dict[str, Any], _passed: Passed) -> dict[str, Any]:
        program, status, reason = self._program(found), found.get("status"), found.get("reason")
        if not isinstance(status, int) or isinstance(status, bool) or not -255 <= status <= 255:
            raise Invalid("a program ends with a status of 0 to 255")
        if reason not in _REASONS:
            raise Invalid(f"a program ends by one of {', '.join(_REASONS)}")
        self._catch_up()  # the launcher may report before the program's connection has ended
        self._programs.end(program, status, reason)
        return {"usage": program.used.facts()}

    def _program(self, found: dict[str, Any]) -> Program:
        return self._programs.of_launcher(self._link, _id(found.get("id")))


async def _send(connection: PeerSocket, link: Link) -> None:
    """Send messages, one packet each. A launcher that reads nothing for `READ_WITHIN_S` is dropped."""
    while True:
        data = await link.next()
        with trio.move_on_after(READ_WITHIN_S) as patience:
            await connection.send(data)
        if patience.cancelled_caught:
            raise SymError(f"it has read nothing for {READ_WITHIN_S:g} s", errno.ETIMEDOUT)


async def _break_off(link: Link) -> None:
    await link.broken_off.wait()
    raise SymError("it does not read the daemon's messages", errno.ETIMEDOUT)


def _protocol(newest: Any) -> int:
    """Return the version that both sides speak. SymError: no version is known to both."""
    if not isinstance(newest, int):
        raise Invalid("the version that a launcher speaks is a number")
    if newest < OLDEST_PROTOCOL:
        raise SymError(
            f"the launcher is of another release (it speaks version {newest}, this daemon {OLDEST_PROTOCOL} to "
            f"{PROTOCOL}): end its programs, and `symphony run` starts one of this release",
            errno.EPROTO,
        )
    return min(newest, PROTOCOL)


def _id(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 8 or not _IDS.issuperset(value):
        raise Invalid("the id of a program has 8 hexadecimal digits")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise Invalid(f"the name of a program has 1 to {MAX_NAME} printable characters")
    return value


def _pid(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_PID:
        raise Invalid(f"the pid of a program is 1 to {MAX_PID}")
    return value
