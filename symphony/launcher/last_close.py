"""The end of connections that a program made to its own socket.

A descriptor that waits in a connection is closed with it, and its last close takes as long as the program likes:
`scheduler/peer_socket.py` says how. A launcher reads none of these connections, so the kernel can refuse descriptors.
Kernels before Linux 6.16 can't: there threads close, few of each program, and a program whose threads all hang is not
accepted any more.
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
"""A thread is busy for some microseconds unless it hangs."""


def refuse_descriptors(listening: socket.socket) -> None:
    """Have the kernel refuse descriptors that are sent to connections of `listening`, if it can."""
    with suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


class Closer:
    """Closes the connections of one program, and never waits."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    @property
    def has_room(self) -> bool:
        self._threads = [each for each in self._threads if each.is_alive()]
        return len(self._threads) < MAX_THREADS_OF_A_PROGRAM

    def close(self, connection: socket.socket) -> None:
        """Close a connection, or the listener with all that wait to be accepted."""
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
