"""Metrics over HTTP for this machine alone: GET /metrics on a port of 127.0.0.1 and of ::1.

The answer is the content of `.symphony/metrics`: numbers by uid and domain, without names of files or programs. Every
user of the machine can connect and read it. A web page could connect, too, if a domain name of its own resolved to this
machine. So a request must name the host by its address or as localhost.

Clients are served on the trio thread, which every call needs, so they get little of its time. The port limits the rate
of connections, takes one request from each, and makes the text at most a few times a second. A slow connection is
closed after a deadline, or as soon as a new connection needs its place.
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
from scheduler.wire.peers import accept_for_ever

log = logging.getLogger(__name__)

HOSTS = ("127.0.0.1", "::1")
_CALLED = frozenset({b"127.0.0.1", b"[::1]", b"localhost"})
PATH = b"/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DEADLINE_S = 5.0
"""Longest life of a connection, from its first byte to its last."""
PAUSE_S = 0.01
"""Pause after each connection. 100 connections in a second take 4 % of the thread."""
FRESH_S = 0.25
"""Age up to which a text is reused for another request."""
MAX_CONNECTIONS = 8
MAX_REQUEST_BYTES = 8 << 10
_NO_IPV6 = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


class MetricsPort:
    """Port of the daemon's metrics. The operator may choose to have none."""

    def __init__(self, port: int | None, text: Callable[[], str]) -> None:
        """Bind the port. 0: any free port; None: no port. SymError: the port can't be bound."""
        self._text = text
        self._bound = [] if port is None else bind(port)
        self._told = b""
        self._told_s = -FRESH_S
        self._serving: dict[trio.CancelScope, None] = {}

    @property
    def number(self) -> int | None:
        return int(self._bound[0].getsockname()[1]) if self._bound else None

    async def run(self) -> None:
        """Serve for ever. Return at once if there is no port."""
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
        while len(self._serving) >= MAX_CONNECTIONS:  # connections to both hosts arrive independently
            oldest = next(iter(self._serving))
            del self._serving[oldest]
            oldest.cancel()
        with connection, trio.move_on_after(DEADLINE_S) as scope:
            self._serving[scope] = None
            try:
                await self._answer(connection)
            except (OSError, trio.BrokenResourceError):
                pass  # the client has gone
            except Exception:
                log.exception("connection for metrics dropped")  # a defect of the daemon: it ends only this connection
            finally:
                self._serving.pop(scope, None)

    async def _answer(self, connection: trio.socket.SocketType) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        request = None
        try:
            request = await _request(http, connection)
            if request is None:
                return
            http.next_event()  # reads the end of a request without a body
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
    """Read the client's request. None: the client has gone."""
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await connection.recv(MAX_REQUEST_BYTES))
    return event if isinstance(event, h11.Request) else None


async def _send(
    http: h11.Connection, connection: trio.socket.SocketType, status: int, text: bytes, *, has_text: bool
) -> None:
    """Send the answer and the end of the connection."""
    headers = [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(text))), ("Connection", "close")]
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", "GET, HEAD"))
    answer = http.send(h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)) or b""
    answer += (http.send(h11.Data(text)) or b"") if has_text else b""
    answer += http.send(h11.EndOfMessage()) or b""
    await trio.SocketStream(connection).send_all(answer)
    connection.shutdown(socket.SHUT_WR)


async def _read_to_the_end(connection: trio.socket.SocketType) -> None:
    """Read until the client closes. A close with unread bytes resets the connection, and the answer is lost."""
    while await connection.recv(MAX_REQUEST_BYTES):
        pass


def bind(port: int) -> list[socket.socket]:
    """Return bound sockets that do not listen yet: one for each address in `HOSTS` that this machine has."""
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
