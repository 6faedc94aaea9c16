"""Bytes both ways between two TCP connections, so that each end meets what it would meet with the other one itself.

The end of one direction is passed on, and the other one goes on. A reset is passed on as a reset. An end that does
not read holds up the other one: of each direction one chunk is in memory, the rest stays with the kernel.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

CHUNK_BYTES = 128 << 10
"""Of one direction in memory."""
LOOK_S = 30.0
"""So often a connection is looked at that has ended its direction, and is read no more: has it gone?"""
_LINGER_NOT = struct.pack("ii", 1, 0)
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""A host that has vanished is noticed after two minutes, and a socket whose process closed it, too."""
_TCP_CLOSE = 7


def reset(connection: socket.socket) -> None:
    """Closes it; the other end gets ECONNRESET, whatever was on its way."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    connection.close()


class Relay:
    """One connection of a program, with the one that was made for it."""

    def __init__(self, inside: socket.socket, outside: socket.socket, on_sent: Callable[[], None]) -> None:
        """It owns both, and closes them. `on_sent`: all that the program wrote has gone out."""
        self._inside = inside
        self._outside = outside
        self._on_sent = on_sent
        self._loop = asyncio.get_running_loop()
        self._ended: set[socket.socket] = set()
        """Those whose other ends know that no more comes."""
        self._is_broken = False
        self._over = asyncio.Event()
        """Both directions have ended, or one can't go on."""
        for each in (inside, outside):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the ends have waited for more already
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                each.setsockopt(socket.IPPROTO_TCP, option, value)

    async def run(self) -> None:
        """Until both directions have ended. Cancelled, it resets what has not: nobody takes a part for the whole."""
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
        """OSError: `source` has gone, so that nothing is left to do in either direction."""
        while chunk := await self._loop.sock_recv(source, CHUNK_BYTES):
            try:
                await self._loop.sock_sendall(sink, chunk)
            except OSError:  # `sink` was reset, but what it had said before is still on its way to `source`
                self._break()
                return
            await asyncio.sleep(0)  # both ends may be fast: others have their turns
        if not self._is_broken:
            self._end(sink)
        await self._stay(source)

    def _end(self, sink: socket.socket) -> None:
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # it was reset
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
        """Until the other direction has ended, too. One that was closed, and not only ended, takes nothing any more."""
        while not self._over.is_set():
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._over.wait()
            except TimeoutError:
                if source.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
                    raise ConnectionResetError from None
