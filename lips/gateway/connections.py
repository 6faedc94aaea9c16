"""Connections of clients: finds the account of each, limits their number, and serves only HTTP/1.1 on them."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import ASGIFramework, LifespanState
from hypercorn.utils import wrap_app

from lips.gateway.peers import uid_of

log = logging.getLogger(__name__)
FEWEST = 1024
_REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 5\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_ACCEPTS_AGAIN_S = 0.5
GONE_S = 60.0
"""Time that the answers of a connection may take to end after the client has gone."""
_SITE_BITS = 64  # bits of an IPv6 network whose addresses may all belong to one client


async def _stay_with_http1(_self: H11Protocol, _request: object) -> None:
    """Ignore an upgrade to HTTP/2, as RFC 9110 allows."""


# Hypercorn has no option against HTTP/2 without TLS, and never closes an HTTP/2 connection that is idle from its start.
H11Protocol._check_protocol = _stay_with_http1  # type: ignore[assignment,method-assign]  # noqa: SLF001 - see above


def raise_limit() -> int:
    """Raise the soft limit on open files to the hard limit; return the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


class _Connection(TCPServer):
    """A Hypercorn connection that ends when its client closes it, instead of at its idle timeout."""

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


class _Protocol(asyncio.StreamReaderProtocol):
    """Protocol of a connection. Some time after the client has gone, the task of the connection is cancelled.

    Hypercorn's task would wait for ever if the client has sent another request behind the one that is being answered.
    """

    def __init__(self, reader: asyncio.StreamReader, task: asyncio.Task[None]) -> None:
        super().__init__(reader)
        self._serving: asyncio.Task[None] | None = task
        self._timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._serving is not None:
            self._timer = asyncio.get_running_loop().call_later(GONE_S, self._serving.cancel)

    def end(self) -> None:
        """Note that the task has ended."""
        self._serving = None
        if self._timer is not None:
            self._timer.cancel()


class Connections:
    """All connections of one server."""

    def __init__(self, app: ASGIFramework, config: Config, max_files: int) -> None:
        self._app = wrap_app(app, 0, "asgi")
        self._config = config
        self.most = max(FEWEST, max_files // 4)
        """Maximum number of connections of one account or address."""
        self._context = WorkerContext(None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_by_party: Counter[str] = Counter()
        self._refused: set[str] = set()
        self._complaint = ""
        self._listeners: dict[socket.socket, asyncio.Task[None]] = {}

    def listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners[listener] = asyncio.create_task(self._accept(listener))

    async def end(self, within_s: float) -> None:
        """Stop accepting connections; wait up to `within_s` for answers in flight, then cancel them."""
        await self._context.terminated.set()
        await _cancelled(self._listeners.values())
        for listener in self._listeners:
            listener.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_s)
            await _cancelled(late)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections until cancelled. A refused connection costs neither a task nor a buffer."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno != errno.ECONNABORTED:  # no descriptors or no memory: retry soon
                    log.warning("no connection can be accepted: %s", error.strerror)
                    await asyncio.sleep(_ACCEPTS_AGAIN_S)
                continue
            uid = self._uid_of(connection)
            party = _party(connection, uid)
            if self._num_by_party[party] < self.most:
                self._num_by_party[party] += 1
                task = asyncio.create_task(self._serve(connection, uid, party))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._refuse(party, connection)
            await asyncio.sleep(0)  # sock_accept does not yield to the loop if a connection waits already

    async def _serve(self, connection: socket.socket, uid: int | None, party: str) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        task = asyncio.current_task()
        assert task is not None
        protocol = _Protocol(reader, task)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            state: LifespanState = {"uid": uid, "transport": transport}
            await _Connection(self._app, loop, self._config, self._context, state, reader, writer)
        finally:
            protocol.end()
            self._num_by_party[party] -= 1
            if not self._num_by_party[party]:
                del self._num_by_party[party]
                self._refused.discard(party)

    def _uid_of(self, connection: socket.socket) -> int | None:
        try:
            return uid_of(connection)
        except OSError as error:
            if error.strerror != self._complaint:
                self._complaint = str(error.strerror)
                log.warning("the account of a connection cannot be found: %s", error.strerror)
            return None

    def _refuse(self, party: str, connection: socket.socket) -> None:
        """Answer 429 and close. Log each party once, until all of its connections are closed."""
        if party not in self._refused:
            self._refused.add(party)
            log.warning("%s has %d connections, the most that it may have: more are refused", party, self.most)
        with connection, suppress(OSError):  # the client may have closed the connection
            connection.send(_REFUSED, socket.MSG_DONTWAIT)


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _party(connection: socket.socket, uid: int | None) -> str:
    """Return the name of the account or address to whose limit a connection counts."""
    if uid is not None:
        return f"uid {uid}"
    try:
        address = ipaddress.ip_address(connection.getpeername()[0].partition("%")[0])
    except OSError:  # the client has closed the connection
        return "unknown"
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, _SITE_BITS), strict=False))
    return str(address)
