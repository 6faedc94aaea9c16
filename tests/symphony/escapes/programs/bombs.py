"""Programs that take all that they can get, until they are stopped: bombs.py NAME. Each says what it got."""

from __future__ import annotations

import array
import json
import os
import pty
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

MIB = 1 << 20


def tell(got: object) -> None:
    with suppress(OSError):
        os.write(1, json.dumps({"got": got}).encode() + b"\n")


def tell_taken(take: Callable[[], object], most: int) -> None:
    """Take until it is refused, tell how often it was given, and hold all of it."""
    tell(until_refused(take, most))
    signal.pause()


def until_refused(take: Callable[[], object], most: int) -> int:
    """How often it was given."""
    for number in range(most):
        try:
            take()
        except (OSError, MemoryError, RuntimeError):
            return number
    return most


def busy() -> None:
    """No bomb, for comparison: two processes that compute."""
    tell("computes")
    os.fork()
    while True:
        pass


def fork() -> None:
    """Forks for ever; each of its processes does."""
    tell("forks")
    while True:
        with suppress(OSError):
            os.fork()


def fork_and_flee() -> None:
    """Each process forks a successor in a session of its own, and ends: nobody can kill it by its number."""
    tell("flees")
    if os.fork():
        signal.pause()
    while True:
        with suppress(OSError):
            if os.fork():
                os._exit(0)
            os.setsid()


def threads() -> None:
    """Threads that do nothing."""
    tell_taken(lambda: threading.Thread(target=time.sleep, args=(3600,), daemon=True).start(), 100_000)


def memory() -> None:
    """Memory in one process."""
    tell("takes memory")
    kept = []
    while True:
        kept.append(b"x" * 8 * MIB)


def memory_of_many() -> None:
    """Memory in a process and its children, which each stay below what one may have."""
    tell("takes memory")
    for _ in range(16):
        if os.fork() == 0:
            break
    kept = [os.urandom(MIB) * 40]
    assert kept
    signal.pause()


def hidden_memory() -> None:
    """Memory that belongs to no process's mappings: files in memory, pipes, sockets."""
    files = []

    def take() -> None:
        file = os.memfd_create("bomb")
        files.append(file)
        if os.write(file, b"x" * 8 * MIB) < 8 * MIB:
            raise MemoryError

    tell({"MiB": 8 * until_refused(take, 512)})
    signal.pause()


def disk() -> None:
    """Files in all directories that it may write to."""
    taken: dict[str, int | str | None] = {}
    for where in ("/tmp", "/var/tmp", "/dev/shm", os.getcwd(), os.environ.get("HOME", "/root"), "/run", "/"):
        try:
            with tempfile.NamedTemporaryFile(dir=where, delete=False) as file:
                raw = file.file.raw if hasattr(file.file, "raw") else file.file
                taken[where] = until_refused(partial(raw.write, b"x" * MIB), 4096)
        except OSError as error:
            taken[where] = error.strerror
    tell(taken)
    signal.pause()


def many_files() -> None:
    """Empty files, which take the kernel's memory."""
    room = Path(tempfile.mkdtemp())
    numbers = iter(range(1 << 30))
    tell_taken(lambda: os.close(os.open(room / str(next(numbers)), os.O_CREAT)), 300_000)


def output() -> None:
    """Output without end."""
    while True:
        os.write(1, b"x" * 65535 + b"\n")


def descriptors() -> None:
    """Descriptors, in many processes."""
    for _ in range(20):
        if os.fork() == 0:
            break
    tell_taken(lambda: os.dup(0), 1_000_000)


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


def kv_files() -> None:
    """KV files and plain files on the mount."""
    import libsym as sym

    kept: list[object] = []
    entries = until_refused(lambda: kept.append(sym.kv_write(sym.kv_create(), [1] * 512)), 2_000)
    where = Path(sym.model_info().mount) / f"bomb-{os.getpid()}"
    with suppress(OSError), where.open("wb", buffering=0) as file:
        tell({"files": entries, "plain MiB": until_refused(lambda: file.write(b"x" * MIB), 64)})
    with suppress(OSError):
        where.unlink()
    signal.pause()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
