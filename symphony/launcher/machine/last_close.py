"""Closing of the connections that programs make to their own sockets, without blocking the launcher.

Descriptors that a program has sent are closed with the connection. The program can delay this close for any time:
`scheduler/wire/peer_socket.py` says how. A launcher never receives from these connections, so the kernel can refuse
descriptors.

Kernels before Linux 6.16 can't refuse descriptors. There, threads close the connections, a few threads for each
program. If all threads of a program hang, the launcher accepts no connection of that program until a thread ends.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress

log = logging.getLogger(__name__)

SO_PASSRIGHTS = 83
MAX_THREADS_OF_A_PROGRAM = 4
"""Upper bound of the closing threads of one program. A thread that does not hang takes some microseconds."""


def refuse_descriptors(listening: socket.socket) -> None:
    """Have the kernel refuse descriptors that are sent to connections of `listening`, if it can."""
    with suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


class Closer:
    """Closer of one program's connections, which never waits for a close."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    @property
    def has_room(self) -> bool:
        self._threads = [each for each in self._threads if each.is_alive()]
        return len(self._threads) < MAX_THREADS_OF_A_PROGRAM

    def close(self, connection: socket.socket) -> None:
        """Close a connection, or a listener with its connections that are not accepted yet."""
        if _refuses_descriptors(connection):
            connection.close()
            return
        closing = threading.Thread(target=os.close, args=(connection.detach(),), daemon=True)
        try:
            closing.start()
        except RuntimeError as error:
            log.warning("a program's connection stays open: %s", error)
            return
        self._threads.append(closing)
        if not self.has_room:
            log.warning("a program has sent descriptors that take long to close: its connections have to wait")


def _refuses_descriptors(connection: socket.socket) -> bool:
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) == 0
    except OSError:
        return False
