"""Connections of sockets: they are accepted for ever, and the kernel knows who is at the other end."""

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
"""Without room for one more connection."""
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_MAX_GROUPS = 256
"""Supplementary groups of a peer: Python's getsockopt takes a buffer of 1,024 bytes at most."""


async def accept_for_ever(
    listening: trio.socket.SocketType, what: str, start: Callable[[trio.socket.SocketType], None], pause_s: float = 0.0
) -> NoReturn:
    """Starts to serve each connection as it comes, with a pause after each; `what` it is, for the log."""
    while True:
        try:
            connection, _ = await listening.accept()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            log.warning("no %s can be accepted: %s", what, error.strerror)
            await trio.sleep(ACCEPT_AGAIN_S)
        else:
            start(connection)
            await trio.sleep(pause_s)


def peer_credentials(connection: socket.socket) -> tuple[int, Credentials]:
    """The pid and the identity of the process at the other end, as it was when it connected."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", peer)
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError as error:
        raise SymError(f"the groups of process {pid} can't be read: {error.strerror}", error.errno) from error
    groups = struct.unpack(f"{len(raw) // 4}I", raw)
    return pid, Credentials(uid, gid, frozenset(groups))


def peer_pidfd(connection: socket.socket, pid: int) -> int | None:
    """A descriptor of the process that connected, readable when it has ended. None: this kernel tells nothing of it.

    ProcessLookupError: it has ended.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except ProcessLookupError:
        raise
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # before Linux 6.5 by its number, which might be another's by now
            log.debug("no pidfd of the peer %d: %s", pid, error.strerror)
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:  # not of our namespace, or a kernel before 5.3: the socket's hang-up has to do
        log.debug("no pidfd of process %d: %s", pid, error.strerror)
        return None
