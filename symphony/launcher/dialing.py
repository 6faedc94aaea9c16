"""A connection to one of a host's addresses, as soon as one of them answers.

One address after the other is tried: each a quarter of a second after the one before, or as soon as that has failed. So
where IPv6 leads nowhere, IPv4 is there at once (RFC 8305).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Found = Sequence[tuple[int, int, int, str, Any]]
"""What getaddrinfo(3) gives."""
Resolve = Callable[..., Awaitable[Found]]
"""`loop.getaddrinfo`, or what does as it."""

NEXT_S = 0.25
MAX_ADDRESSES = 16
AGAIN_S = 0.1
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Other connections may end, then there is room: who dials waits as long as it has time."""


async def dial(found: Found) -> socket.socket:
    """The first connection that comes about. OSError: none did; it is the first address's."""
    waiting = [(family, where) for family, _, _, _, where in found if not _is_nowhere(where)][:MAX_ADDRESSES]
    attempts: set[asyncio.Task[socket.socket]] = set()
    first: BaseException | None = None
    try:
        while waiting or attempts:
            if waiting:
                attempts.add(asyncio.create_task(_attempt(*waiting.pop(0))))
            pause_s = NEXT_S if waiting else None
            done, _ = await asyncio.wait(attempts, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                attempts.remove(attempt)
                error = attempt.exception()
                if error is None:
                    return attempt.result()
                first = first or error
        raise first or socket.gaierror(socket.EAI_NODATA, "its name has no address")
    finally:
        for attempt in attempts:
            attempt.add_done_callback(_drop)
            attempt.cancel()


def _is_nowhere(where: Any) -> bool:
    """Resolvers that block a name say 0.0.0.0, and a connection to that is one to this machine."""
    return ipaddress.ip_address(where[0].partition("%")[0]).is_unspecified


async def _attempt(family: int, where: Any) -> socket.socket:
    connection = await _made(family)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, where)
        _refuse_itself(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_itself(connection: socket.socket) -> None:
    """On loopback the kernel may choose the port that nobody listens on, and connect the socket to itself."""
    if connection.getsockname() == connection.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


async def _made(family: int) -> socket.socket:
    while True:
        try:
            return socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
        await asyncio.sleep(AGAIN_S)


def _drop(attempt: asyncio.Task[socket.socket]) -> None:
    """It lost: another one was first, or nobody waits any more."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()
