"""The outside of `--allow-net`: takes what a program connects to in its sandbox, and connects to the real host for it.

What a connection reaches follows from the listener that it came to, and from nothing that the program says.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

from symphony.launcher.dialing import AGAIN_S, Found, Resolve, dial
from symphony.launcher.grants import Grant, inside_addresses, shown
from symphony.launcher.places import Refused
from symphony.launcher.relay import Relay, reset

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Of a program at once; more wait where they arrive."""
REACH_S = 20.0
"""For the name and all addresses of a host."""
LAST_WORDS_S = 5.0
"""What a program wrote just before it ended has so long to go out."""


class Forwarder:
    """All connections of one program in a sandbox. `on_trouble` gets a line for each grant that leads nowhere."""

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
        """Each one with what is done when all that the program wrote has gone out."""
        self._lookups: dict[Grant, asyncio.Task[Found]] = {}
        self._told: set[str] = set()

    def take(self, listening: Sequence[socket.socket]) -> None:
        """The sandbox's listeners, to own. Refused: one is for none of the grants; then all are closed."""
        try:
            taken = {each: self._granted[_where(each)] for each in listening}
        except KeyError as error:
            for each in listening:
                each.close()
            raise Refused(f"the sandbox listens at {error}, which none of its grants is") from None
        for each in taken:
            each.setblocking(False)
        self._listening |= taken
        self._go_on()

    def close(self) -> None:
        """Nothing is accepted any more; connections that have not ended are reset."""
        self._stop_listening()
        for task in (*self._connections, *self._lookups.values()):
            task.cancel()

    async def finish(self) -> None:
        """The program has ended: what it wrote before goes out, for a few seconds at most. Then as `close`."""
        for listening in list(self._listening):
            self._accept(listening)
        self._stop_listening()
        if self._connections:
            await asyncio.wait(self._connections.values(), timeout=LAST_WORDS_S)
        self.close()

    # What arrives.

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
            except OSError as error:  # no descriptors or memory for one more: it waits in the queue
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
        if inside.fileno() >= 0:  # it came to no relay
            reset(inside)
        _settle(self._connections.pop(task))
        if not task.cancelled():
            task.result()
        if self._is_paused:
            self._go_on()

    # What becomes of it.

    async def _serve(self, inside: socket.socket, grant: Grant, sent: asyncio.Future[None]) -> None:
        try:
            async with asyncio.timeout(REACH_S):
                outside = await dial(await self._find(grant))
        except OSError as error:  # no answer in time, too
            self._tell(grant, error)
        else:
            await Relay(inside, outside, partial(_settle, sent)).run()

    async def _find(self, grant: Grant) -> Found:
        """The addresses of now. Connections that want them at the same time ask once: a thread waits for the answer."""
        lookup = self._lookups.get(grant)
        if lookup is None:
            lookup = self._lookups[grant] = self._loop.create_task(self._look_up(grant))
            lookup.add_done_callback(lambda _: self._lookups.pop(grant))
        return await asyncio.shield(lookup)

    async def _look_up(self, grant: Grant) -> Found:
        host, port = grant
        return await self._resolve(host, port, type=socket.SOCK_STREAM)

    def _tell(self, grant: Grant, error: OSError) -> None:
        """Each cause once for a grant."""
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
    return os.strerror(error.errno)  # asyncio's own text has the address, which differs from time to time


def _where(listening: socket.socket) -> tuple[str, int]:
    address, port = listening.getsockname()[:2]
    return str(ipaddress.ip_address(address)), port
