"""The programs socket: launchers say which programs there are, and pass the connections of these on.

A launcher is a process of one user. It has one connection, of packets, for all its programs: each packet is a JSON
object, perhaps with one descriptor. What it may say is about its own programs alone, and who it is the kernel says. A
connection that it passes on is served as if it had been accepted here: who is at the other end is the kernel's word
again, and has to be the launcher's own user.

A launcher lives as long as its programs, and so longer than a daemon that is upgraded. `start` says which version of
these messages it speaks (PROTOCOL; one that says nothing speaks the first), and is answered with the one that both do.
Words that the other side does not know are skipped.

Nothing that a launcher does reaches others. `peer_socket.py` sees to the descriptors that it sends. What is no request
ends its connection; what it floods waits in its own
socket, for its requests are taken one by one; where it does not read, it is not listened to either. Its programs live
on without it, and so do their connections: it comes again and names them.
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
from scheduler.payloads import bounded_json
from scheduler.peer_socket import PeerSocket, Threads
from scheduler.peers import accept_for_ever, peer_credentials
from scheduler.programs.limits import ProgramLimits
from scheduler.programs.link import MAX_MESSAGE_BYTES, Link
from scheduler.programs.program import Program
from scheduler.programs.registry import Programs

log = logging.getLogger(__name__)

PROTOCOL, OLDEST_PROTOCOL = 1, 1
"""Of these messages: the newest version that is spoken here, and the oldest."""
MAX_LAUNCHERS = 256
"""Connected at once. One user has one."""
MAX_NAME = 64
MAX_TEXTS, MAX_OTHER_BYTES = 64, 1024
"""In a message: launchers say short things."""
MAX_PID = 1 << 22
READ_WITHIN_S = 30.0
"""A launcher that takes nothing for so long, though there is something, is not served any more."""
_REASONS = ("exit", "signal", "time", "memory", "tokens", "pages", "page_seconds", "processes", "killed", "restart")
_IDS = frozenset("0123456789abcdef")

Adopt = Callable[[socket.socket, Program], None]
Passed = list[int] | SymError
"""A list of the descriptor that came with a request, for its owner to take out; or why that is no connection."""
_NONE_CAME = "a connection is passed on with its descriptor, and none came"
_UNFIT = "what was passed on is no connection of a Unix socket for streams"


class Launchers:
    """Accepts launchers and serves each until either side goes."""

    def __init__(
        self,
        programs: Programs,
        adopt: Adopt,
        exempt: frozenset[int] = frozenset(),
        house: dict[str, Any] | None = None,
        threads: Threads | None = None,
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`house`: what launchers are told, as `_Requests` has it. `threads`: for what may hang in what they send.

        `catch_up` counts what programs have used so far.
        """
        self._programs = programs
        self._catch_up = catch_up
        self._house = house or {}
        self._adopt = adopt
        self._threads = threads or Threads()
        self._places = Places(MAX_LAUNCHERS, "launchers", exempt)
        self.num_connected = 0

    async def run(self, listening: trio.socket.SocketType) -> None:
        """Accept for ever."""
        async with trio.open_nursery() as nursery:
            await accept_for_ever(
                listening,
                "launcher",
                lambda connection: nursery.start_soon(self._serve, PeerSocket(connection, self._threads)),
            )

    async def _serve(self, connection: PeerSocket) -> None:
        """Serve a launcher; nothing that happens to it reaches the others."""
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
                    raise ProtocolError(f"a message of more than {MAX_MESSAGE_BYTES} bytes, or than one descriptor")
                passed = fds or Invalid(_UNFIT if found.num_descriptors else _NONE_CAME)
                answer = requests.take(found.data, passed)
            finally:
                connection.dispose(fds)
            if answer is not None:
                link.tell(answer)
            await trio.lowlevel.checkpoint()


class _Requests:
    """Requests of one launcher. A wrong one is answered by its error; bytes that are none are a ProtocolError."""

    def __init__(
        self, programs: Programs, adopt: Adopt, link: Link, house: dict[str, Any], catch_up: Callable[[], None]
    ) -> None:
        """`house`: `mount`, the directory of KV; `hidden`, paths of the daemon's that are not for programs."""
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
        """The answer to a request; None: it was an answer itself."""
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
            self._link.answered(number, found)  # one that is not asked for: whoever asked has given up

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
        """NotPermitted: a launcher has connections of its own user, unless that is root."""
        uid = peer_credentials(connection)[1].uid
        if self._link.uid not in (0, uid):
            raise NotPermitted(f"uid {self._link.uid} can't pass on a connection of uid {uid}")

    def _limit(self, found: dict[str, Any], _passed: Passed) -> dict[str, Any]:
        """Tell which limit a program has run into, if any: one may end by it before its launcher has heard of it."""
        over = self._program(found).over
        return {"what": None if over is None else over.what}

    def _end(self, found: dict[str, Any], _passed: Passed) -> dict[str, Any]:
        program, status, reason = self._program(found), found.get("status"), found.get("reason")
        if not isinstance(status, int) or isinstance(status, bool) or not -255 <= status <= 255:
            raise Invalid("a program ends with a status of 0 to 255")
        if reason not in _REASONS:
            raise Invalid(f"a program ends by one of {', '.join(_REASONS)}")
        self._catch_up()  # the launcher may be faster than the end of the program's connection
        self._programs.end(program, status, reason)
        return {"usage": program.used.facts()}

    def _program(self, found: dict[str, Any]) -> Program:
        return self._programs.of_launcher(self._link, _id(found.get("id")))


async def _send(connection: PeerSocket, link: Link) -> None:
    """Send answers, a packet each. A launcher that does not read is given a while."""
    while True:
        data = await link.next()
        with trio.move_on_after(READ_WITHIN_S) as patience:
            await connection.send(data)
        if patience.cancelled_caught:
            raise SymError(f"it has read nothing for {READ_WITHIN_S:g} s", errno.ETIMEDOUT)


async def _break_off(link: Link) -> None:
    await link.broken_off.wait()
    raise SymError("it does not read what it has to know", errno.ETIMEDOUT)


def _protocol(newest: Any) -> int:
    """The version that both speak. A SymError: there is none."""
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
