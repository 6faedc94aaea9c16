"""The metrics over HTTP, for this machine alone: GET /metrics on a port of 127.0.0.1 and of ::1.

What is told is what `.symphony/metrics` tells: numbers by uid and by domain, no name of a file or of a program. Whoever
can connect may read it, which is every user of the machine. A page in a browser can connect, too, if a name of its own
leads to this machine; so a request has to call the host by its address, or localhost.

Whoever asks shares the thread that all calls wait for, so he gets little of it: connections are accepted at a pace,
each is for one request, the text is made at most some times a second. One that is slow is closed after a time, or as
soon as its place is needed for the next.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable
from http import HTTPStatus

import h11
import trio

from libsym.errors import SymError
from scheduler.peers import accept_for_ever

log = logging.getLogger(__name__)

HOSTS = ("127.0.0.1", "::1")
_CALLED = frozenset({b"127.0.0.1", b"[::1]", b"localhost"})
PATH = b"/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DEADLINE_S = 5.0
"""For a connection, from its first byte to its last."""
PAUSE_S = 0.01
"""After each connection: 100 of them in a second are 4 % of the thread."""
FRESH_S = 0.25
"""A text so young is told again."""
MAX_CONNECTIONS = 8
MAX_REQUEST_BYTES = 8 << 10
_NO_IPV6 = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


class MetricsPort:
    """One port, or none."""

    def __init__(self, port: int | None, text: Callable[[], str]) -> None:
        """It is this daemon's from now on; 0: any that is free. SymError: it is not to be had."""
        self._text = text
        self._bound = [] if port is None else bind(port)
        self._told = b""
        self._told_s = -FRESH_S
        self._serving: dict[trio.CancelScope, None] = {}

    @property
    def number(self) -> int | None:
        return int(self._bound[0].getsockname()[1]) if self._bound else None

    async def run(self) -> None:
        """Serve for ever, or return if there is no port."""
        async with trio.open_nursery() as nursery:
            for bound in self._bound:
                nursery.start_soon(self._listen, bound)

    async def _listen(self, bound: socket.socket) -> None:
        bound.listen()
        with trio.socket.from_stdlib_socket(bound) as listening:
            async with trio.open_nursery() as nursery:
                await accept_for_ever(
                    listening,
                    "connection for metrics",
                    lambda connection: nursery.start_soon(self._serve, connection),
                    PAUSE_S,
                )

    async def _serve(self, connection: trio.socket.SocketType) -> None:
        while len(self._serving) >= MAX_CONNECTIONS:  # those of both hosts come at once
            oldest = next(iter(self._serving))
            del self._serving[oldest]
            oldest.cancel()
        with connection, trio.move_on_after(DEADLINE_S) as scope:
            self._serving[scope] = None
            try:
                await self._answer(connection)
            except (OSError, trio.BrokenResourceError):
                pass  # it has gone
            except Exception:
                log.exception("connection for metrics dropped")  # a defect of ours, and no more than that
            finally:
                self._serving.pop(scope, None)

    async def _answer(self, connection: trio.socket.SocketType) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        request = None
        try:
            request = await _request(http, connection)
            if request is None:
                return
            http.next_event()  # so that a request without a body is over
            status, text = self._told_for(request)
        except h11.RemoteProtocolError as error:
            status, text = error.error_status_hint, f"{error}\n".encode()
        has_text = request is None or request.method != b"HEAD"
        await _send(http, connection, status, text, has_text=has_text)
        if http.their_state not in (h11.DONE, h11.MUST_CLOSE):
            await _read_to_the_end(connection)

    def _told_for(self, request: h11.Request) -> tuple[int, bytes]:
        host = dict(request.headers).get(b"host", b"localhost").lower()
        if host.rpartition(b":")[0] not in _CALLED and host not in _CALLED:
            return 403, b"the metrics of this machine are for this machine: call it localhost\n"
        if request.target.partition(b"?")[0] != PATH:
            return 404, b"there is nothing but /metrics\n"
        if request.method not in (b"GET", b"HEAD"):
            return 405, b"the metrics can be read, and nothing else\n"
        return 200, self._metrics()

    def _metrics(self) -> bytes:
        now_s = time.monotonic()
        if now_s - self._told_s >= FRESH_S:
            self._told, self._told_s = self._text().encode(), now_s
        return self._told


async def _request(http: h11.Connection, connection: trio.socket.SocketType) -> h11.Request | None:
    """None: the client has gone."""
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await connection.recv(MAX_REQUEST_BYTES))
    return event if isinstance(event, h11.Request) else None


async def _send(
    http: h11.Connection, connection: trio.socket.SocketType, status: int, text: bytes, *, has_text: bool
) -> None:
    """The answer, and that nothing follows it."""
    headers = [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(text))), ("Connection", "close")]
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", "GET, HEAD"))
    answer = http.send(h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)) or b""
    answer += (http.send(h11.Data(text)) or b"") if has_text else b""
    answer += http.send(h11.EndOfMessage()) or b""
    await trio.SocketStream(connection).send_all(answer)
    connection.shutdown(socket.SHUT_WR)


async def _read_to_the_end(connection: trio.socket.SocketType) -> None:
    """What is closed before all of it is read takes the answer back."""
    while await connection.recv(MAX_REQUEST_BYTES):
        pass


def bind(port: int) -> list[socket.socket]:
    """Sockets that nobody can connect to yet, one for each of `HOSTS` that this machine has."""
    found: list[socket.socket] = []
    for host in HOSTS:
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setblocking(False)
            bound.bind((host, port))
        except OSError as error:
            bound.close()
            if ":" in host and error.errno in _NO_IPV6:
                log.info("no metrics on %s, which this machine does not have", host)
                continue
            for each in found:
                each.close()
            why = f"{error.strerror}; choose another --metrics-port"
            raise SymError(f"no metrics on port {port} of {host}: {why}", error.errno) from None
        port = bound.getsockname()[1]
        found.append(bound)
    return found
