"""Programs that take all that they can get, until they are stopped: bombs.py NAME. Each says when it has it."""

import array
import os
import pty
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress


def tell_taken(take: Callable[[], object], most: int) -> None:
    """Take until it is refused, tell so, and hold all of it."""
    with suppress(OSError):
        for _ in range(most):
            take()
    os.write(1, b"got all\n")
    signal.pause()


def fork_and_flee() -> None:
    """Each process forks a successor in a session of its own, and ends: nobody can kill it by its number."""
    os.write(1, b"got away\n")
    if os.fork():
        signal.pause()
    while True:
        with suppress(OSError):
            if os.fork():
                os._exit(0)
            os.setsid()


def descriptors_under_way() -> None:
    """Descriptors that were sent and are received by nobody; the kernel counts these for the user."""
    pairs = []

    def take() -> None:
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 250))]
        pairs.append((mine, theirs))
        for _ in range(8):
            mine.sendmsg([b"x"], rights)

    tell_taken(take, 5_000)


def terminals() -> None:
    """Terminals, of which a machine has so many."""
    tell_taken(pty.openpty, 10_000)


def connections() -> None:
    """Connections to the daemon, which are held and never greeted."""
    held = []

    def take() -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(0.5)
        connection.connect(os.environ["SYMPHONY_SOCKET"])
        held.append(connection)

    tell_taken(take, 5_000)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
