"""Forwarder for `--allow-net`: accepts a program's connections from its sandbox, and connects them to the real hosts.

The listener that accepts a connection determines the host. The program's bytes have no influence on the host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

from symphony.launcher.common.grants import Grant, inside_addresses, shown
from symphony.launcher.common.places import Refused
from symphony.launcher.network.dialing import AGAIN_S, Found, Resolve, dial
from symphony.launcher.network.relay import Relay, reset

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Upper bound of a program's simultaneous connections. Further connections wait in the listeners' queues."""
REACH_S = 20.0
"""Time limit for resolving a host's name and trying all its addresses."""
LAST_WORDS_S = 5.0
"""Time limit for sending the bytes that a program wrote just before its end."""


class Forwarder:
    """Forwarder of one sandboxed program's connections. `on_trouble` gets a line if a grant's host can't be reached."""

    def __init__(
        self, grants: Sequence[Grant], on_trouble: Callable[[str], None], resolve: Resolve | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_trouble = on_trouble
        self._resolve = resolve or self._loop.getaddrinfo
        addresses = inside_addresses(grants)
        self._granted: dict[tuple[str, int], Grant] = {}
        for grant in grants:
            for address in addresses[grant[0]]:
                self._granted.setdefault((address, grant[1]), grant)
        self._listening: dict[socket.socket, Grant] = {}
        self._is_paused = False
        self._connections: dict[asyncio.Task[None], asyncio.Future[None]] = {}
        """Task of each connection, with a future that is done when all bytes from the program have been sent."""
        self._lookups: dict[Grant, asyncio.Task[Found]] = {}
        self._told: set[str] = set()

    def take(self, listening: Sequence[socket.socket]) -> None:
        """Take ownership of the sandbox's listeners. Refused: a listener matches no grant; then all are closed."""
        try:
            taken = {each: self._granted[_where(each)] for each in listening}
        except KeyError as error:
            for each in listening:
                each.close()
            raise Refused(f"the sandbox listens at {error}, for which it has no grant") from None
        for each in taken:
            each.setblocking(False)
        self._listening |= taken
        self._go_on()

    def close(self) -> None:
        """Stop accepting connections, and reset those that have not ended."""
        self._stop_listening()
        for task in (*self._connections, *self._lookups.values()):
            task.cancel()

    async def finish(self) -> None:
        """Send the remaining bytes of a program that has ended, for LAST_WORDS_S at most. Then close."""
        for listening in list(self._listening):
            self._accept(listening)
        self._stop_listening()
        if self._connections:
            await asyncio.wait(self._connections.values(), timeout=LAST_WORDS_S)
        self.close()

    # Listeners.

    def _go_on(self) -> None:
        self._is_paused = False
        for listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)

    def _pause(self) -> None:
        self._is_paused = True
        for listening in self._listening:
            self._loop.remove_reader(listening)

    def _stop_listening(self) -> None:
        self._pause()
        for listening in self._listening:
            listening.close()
        self._listening.clear()

    def _accept(self, listening: socket.socket) -> None:
        while len(self._connections) < MAX_CONNECTIONS:
            try:
                inside, _ = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or memory: the connection waits in the queue
                log.warning(
                    "a connection to %s can't be accepted: %s", shown(self._listening[listening]), error.strerror
                )
                self._pause()
                self._loop.call_later(AGAIN_S, self._go_on)
                return
            inside.setblocking(False)
            sent = self._loop.create_future()
            task = self._loop.create_task(self._serve(inside, self._listening[listening], sent))
            self._connections[task] = sent
            task.add_done_callback(partial(self._over, inside))
        self._pause()

    def _over(self, inside: socket.socket, task: asyncio.Task[None]) -> None:
        if inside.fileno() >= 0:  # no relay has closed it
            reset(inside)
        _settle(self._connections.pop(task))
        if not task.cancelled():
            task.result()
        if self._is_paused:
            self._go_on()

    # One connection.

    async def _serve(self, inside: socket.socket, grant: Grant, sent: asyncio.Future[None]) -> None:
        try:
            async with asyncio.timeout(REACH_S):
                outside = await dial(await self._find(grant))
        except OSError as error:  # TimeoutError is an OSError, too
            self._tell(grant, error)
        else:
            await Relay(inside, outside, partial(_settle, sent)).run()

    async def _find(self, grant: Grant) -> Found:
        """Resolve the host of a grant anew for each connection.
        Concurrent connections share a lookup, since each lookup takes a thread.
        """
        lookup = self._lookups.get(grant)
        if lookup is None:
            lookup = self._lookups[grant] = self._loop.create_task(self._look_up(grant))
            lookup.add_done_callback(lambda _: self._lookups.pop(grant))
        return await asyncio.shield(lookup)

    async def _look_up(self, grant: Grant) -> Found:
        host, port = grant
        return await self._resolve(host, port, type=socket.SOCK_STREAM)

    def _tell(self, grant: Grant, error: OSError) -> None:
        """Report why a grant can't be reached, once for each cause."""
        text = f"{shown(grant)} can't be reached: {_cause(error)}"
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)
            self._on_trouble(text)


def _settle(sent: asyncio.Future[None]) -> None:
    if not sent.done():
        sent.set_result(None)


def _cause(error: OSError) -> str:
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"no answer within {REACH_S:g} s"
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)  # the error's own text names the address, which may differ each time


def _where(listening: socket.socket) -> tuple[str, int]:
    address, port = listening.getsockname()[:2]
    return str(ipaddress.ip_address(address)), port
