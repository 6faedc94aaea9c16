"""Connecting to a host with several addresses: the first address that answers is used (RFC 8305).

Addresses are tried in order. The next attempt starts a quarter of a second after the previous one, or as soon as the
previous attempt has failed. So if IPv6 does not work, IPv4 is tried soon.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Found = Sequence[tuple[int, int, int, str, Any]]
"""Addresses, as getaddrinfo(3) returns them."""
Resolve = Callable[..., Awaitable[Found]]
"""Resolver of names: `loop.getaddrinfo`, or a function with the same arguments."""

NEXT_S = 0.25
MAX_ADDRESSES = 16
AGAIN_S = 0.1
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors that mean a lack of descriptors or memory. The dialer tries again, since other connections may end."""


async def dial(found: Found) -> socket.socket:
    """Return the first connection that is established. OSError: all addresses failed; the first error is raised."""
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
    """Return whether an address is 0.0.0.0 or ::, by which resolvers block a name.
    A connection to such an address would reach this machine.
    """
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
    """Refuse a socket that is connected to itself.
    On loopback, if no process listens at the port dialled, the kernel may choose that port as the socket's own.
    """
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
    """Close the connection of an attempt that succeeded too late."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()
