"""Accept connections, and ask the kernel for the identity of their peers."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import NoReturn

import trio

from kvfs.names.tree import Credentials
from libsym.errors import SymError

log = logging.getLogger(__name__)

ACCEPT_AGAIN_S = 0.1
"""Pause after an accept that failed because there was no room for another connection."""
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
HAS_GONE = frozenset(
    getattr(errno, name)
    for name in (
        *("ECONNABORTED", "EPERM", "EPROTO", "ENETDOWN", "ENOPROTOOPT", "EHOSTDOWN", "ENONET"),
        *("EHOSTUNREACH", "EOPNOTSUPP", "ENETUNREACH"),
    )
)
"""Errors of accept(2) on TCP that belong to one connection, which is gone."""
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_MAX_GROUPS = 256
"""Maximum number of supplementary groups of a peer: Python's getsockopt takes a buffer of at most 1,024 bytes."""


async def accept_for_ever(
    listening: trio.socket.SocketType, what: str, start: Callable[[trio.socket.SocketType], None], pause_s: float = 0.0
) -> NoReturn:
    """Accept connections for ever. Pass each to `start`, and then pause. `what` names the connections in the log."""
    while True:
        try:
            connection, _ = await listening.accept()
        except OSError as error:
            if error.errno in HAS_GONE:
                continue
            if error.errno not in NO_ROOM:
                raise
            log.warning("no %s can be accepted: %s", what, error.strerror)
            await trio.sleep(ACCEPT_AGAIN_S)
        else:
            start(connection)
            await trio.sleep(pause_s)


def peer_credentials(connection: socket.socket) -> tuple[int, Credentials]:
    """Return the pid of the process at the other end, and the identity that it had when it connected."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", peer)
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError as error:
        raise SymError(f"the groups of process {pid} can't be read: {error.strerror}", error.errno) from error
    groups = struct.unpack(f"{len(raw) // 4}I", raw)
    return pid, Credentials(uid, gid, frozenset(groups))


def peer_pidfd(connection: socket.socket, pid: int) -> int | None:
    """Return a descriptor that becomes readable when the peer's process ends. None: the kernel cannot provide one.

    ProcessLookupError: the process has ended.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except ProcessLookupError:
        raise
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # Linux before 6.5: the pid may have been reused
            log.debug("no pidfd of the peer %d: %s", pid, error.strerror)
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:  # another namespace, or a kernel before 5.3: the hang-up alone tells the end
        log.debug("no pidfd of process %d: %s", pid, error.strerror)
        return None
