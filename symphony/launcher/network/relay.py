"""Relay: passes bytes both ways between two TCP connections, as if the two peers were connected directly.

The end of one direction is passed on, and the other direction continues. A reset is passed on as a reset. Backpressure
is passed on, too: a peer that does not read stops the other peer. For each direction, one chunk is in memory, and the
rest stays in the kernel.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

CHUNK_BYTES = 128 << 10
"""Maximum number of bytes of one direction in memory."""
LOOK_S = 30.0
"""Interval of the checks whether a connection is still open after its direction has ended."""
_LINGER_NOT = struct.pack("ii", 1, 0)
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""Keepalive options that detect a vanished host, or a socket that its process closed, after two minutes."""
_TCP_CLOSE = 7


def reset(connection: socket.socket) -> None:
    """Close a connection so that its peer gets ECONNRESET. Unsent bytes are dropped."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    connection.close()


class Relay:
    """Relay between a program's connection (inside) and the connection to the real host (outside)."""

    def __init__(self, inside: socket.socket, outside: socket.socket, on_sent: Callable[[], None]) -> None:
        """Take ownership of both connections. `on_sent` is called when all bytes from the program have been sent."""
        self._inside = inside
        self._outside = outside
        self._on_sent = on_sent
        self._loop = asyncio.get_running_loop()
        self._ended: set[socket.socket] = set()
        """Connections that are shut down for writing, since the other direction's source has ended."""
        self._is_broken = False
        self._over = asyncio.Event()
        """Set when both directions have ended, or when a connection was reset."""
        for each in (inside, outside):
            # The peers gather small writes already, so the relay need not delay them again.
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                each.setsockopt(socket.IPPROTO_TCP, option, value)

    async def run(self) -> None:
        """Relay until both directions have ended.
        A cancellation resets connections that have not ended, so that no peer mistakes a part of the data for all.
        """
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._move(self._inside, self._outside))
                both.create_task(self._move(self._outside, self._inside))
        except* OSError:
            self._is_broken = True
        finally:
            for each in (self._inside, self._outside):
                if self._is_broken or each not in self._ended:
                    reset(each)
                else:
                    each.close()

    async def _move(self, source: socket.socket, sink: socket.socket) -> None:
        """Copy bytes from `source` to `sink`. OSError: `source` was reset, which ends both directions."""
        while chunk := await self._loop.sock_recv(source, CHUNK_BYTES):
            try:
                await self._loop.sock_sendall(sink, chunk)
            except OSError:  # `sink` was reset; its earlier bytes are still on their way to `source`
                self._break()
                return
            await asyncio.sleep(0)  # fast peers must not starve other tasks
        if not self._is_broken:
            self._end(sink)
        await self._stay(source)

    def _end(self, sink: socket.socket) -> None:
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # `sink` was reset
            self._break()
            return
        self._ended.add(sink)
        if sink is self._outside:
            self._on_sent()
        if self._ended == {self._inside, self._outside}:
            self._over.set()

    def _break(self) -> None:
        self._is_broken = True
        self._over.set()

    async def _stay(self, source: socket.socket) -> None:
        """Wait for the other direction to end.
        ConnectionResetError: the peer has closed `source` entirely, instead of ending only its own direction.
        """
        while not self._over.is_set():
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._over.wait()
            except TimeoutError:
                if source.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
                    raise ConnectionResetError from None
