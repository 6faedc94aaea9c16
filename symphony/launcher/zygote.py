"""A Python process that has libsym already, and makes programs by fork(2).

It is one thread, and knows nothing of any program but its number. What a program is to be comes as descriptors that go
straight to the child: a memfd with its specification, a pipe for what hinders it, its standard input, output and error.
Messages with the launcher are JSON on a SOCK_SEQPACKET pair:

    launcher → zygote   {"n": 7, "sandbox": true} and the descriptors
    zygote → launcher   {"n": 7, "pid": 4711} or {"n": 7, "error": text}; later {"pid": 4711, "status": N}
                        with N as waitpid(2) has it

With a sandbox the child is the sandbox's first process, and what it says of the program's end is the status.

When the launcher goes, however it went, the zygote ends all programs and itself. When the zygote goes, the kernel ends
the programs.
"""

from __future__ import annotations

import array
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import libsym  # noqa: F401 - what every program needs is there before it is one
from symphony.launcher import child, system
from symphony.launcher.processes import children, descendants, end_tree, send_signal
from symphony.launcher.sandbox.enter import END_BYTES, Outside, clone, ends
from symphony.launcher.sandbox.lacks import Lacks
from symphony.launcher.sandbox.view import system_view

MAX_DESCRIPTORS = 6
"""The specification, the report, standard input, output and error, and for some the door."""
_MAX_MESSAGE_BYTES = 4096
KILL_AGAIN_S = 0.001
"""A program that forks while it is ended has more processes each time."""
ORPHANS_S = 0.02
"""So long at once: others want to start. Each that dies later has the rest looked for again."""


class Zygote:
    """The loop. `base_path` is the interpreter's own sys.path, without what found this file."""

    def __init__(self, launcher: socket.socket, base_path: list[str]) -> None:
        self._launcher = launcher
        self._base_path = base_path
        self._pid = os.getpid()
        self._programs: set[int] = set()
        """Those that live."""
        self._told: set[int] = set()
        """Those that the launcher takes for living."""
        self._launches: dict[int, int] = {}
        """Of the first processes of sandboxes: the numbers of their launches."""
        self._statuses: dict[int, int] = {}
        """By the number of a launch: what its first process said."""
        self._said, self._say = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._said, False)
        self._user = os.getuid(), os.getgid()
        self._wakes, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def run(self) -> child.Order | None:
        """Serves until the launcher goes: None. In a child: what it is to become."""
        poll = select.poll()
        poll.register(self._launcher, select.POLLIN)
        poll.register(self._wakes, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wakes in ready:
                os.read(self._wakes, 4096)
                self._reap()
            if self._launcher.fileno() in ready:
                raw, fds = receive_descriptors(self._launcher)
                if not raw:
                    self._end_all()
                    return None
                words = json.loads(raw)
                order = self._fork(words["n"], fds, sandboxed=words["sandbox"])
                if order is not None:
                    return order

    def _fork(self, number: int, fds: list[int], *, sandboxed: bool) -> child.Order | None:
        orders = -1
        try:
            pid, orders = clone(number, self._said, self._say) if sandboxed else (os.fork(), -1)
        except Lacks as error:
            pid = self._refuse(number, str(error))
        except OSError as error:
            pid = self._refuse(number, f"no process can be made for it: {error.strerror}")
        if pid == 0:
            signal.set_wakeup_fd(-1)
            return child.Order(self._pid, self._base_path, Outside(orders, *self._user), *fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._programs.add(pid)
            self._told.add(pid)
            if sandboxed:
                self._launches[pid] = number
            self._send({"n": number, "pid": pid})
        return None

    def _refuse(self, number: int, text: str) -> int:
        self._send({"n": number, "error": text})
        return -1

    def _reap(self) -> None:
        """Tells of programs that ended. What they left is ended first: nothing else is ever adopted here."""
        ended = list(_ended())
        self._programs -= {pid for pid, _ in ended}
        until_s = time.monotonic() + ORPHANS_S
        while self._end_orphans() and time.monotonic() < until_s:
            time.sleep(KILL_AGAIN_S)
            more = list(_ended())
            self._programs -= {pid for pid, _ in more}
            ended += more
        for pid, status in ended:
            if pid in self._told:
                self._told.remove(pid)
                self._send({"pid": pid, "status": self._status_of_program(pid, status)})

    def _status_of_program(self, pid: int, status: int) -> int:
        """`status` is the process's own: where that is a sandbox's first one, it is told the program's before."""
        number = self._launches.pop(pid, None)
        if number is None:
            return status
        with suppress(BlockingIOError):
            while said := os.read(self._said, 100 * END_BYTES):
                self._statuses.update(ends(said))
        return self._statuses.pop(number, status)

    def _end_orphans(self) -> bool:
        """Whether there were any. What forks while it is killed is here again, as another one."""
        orphans = descendants(set(children(self._pid)) - self._programs)
        return sum(send_signal(orphan, signal.SIGKILL) for orphan in orphans) > 0

    def _send(self, message: dict[str, int | str]) -> None:
        try:
            self._launcher.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self._end_all()
            sys.exit(0)

    def _end_all(self) -> None:
        """The launcher is gone: nobody would know of these programs any more."""
        while end_tree(self._pid):
            list(_ended())
            time.sleep(KILL_AGAIN_S)


def _ended() -> Iterator[tuple[int, int]]:
    """Children that have ended, and their statuses."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def receive_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message with its descriptors; no bytes when the other side has gone."""
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    try:
        raw, ancillary, _, _ = connection.recvmsg(_MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return raw, list(fds)


def main(descriptor: int) -> None:
    """The process. What its launcher put on the path is for this package alone: programs do not have it there."""
    launcher = socket.socket(fileno=descriptor)
    launcher.set_inheritable(False)
    system.adopt_orphans()
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base_path = [entry for entry in sys.path if entry not in added]
    system_view()
    os.environ.clear()  # here once, and not in each child
    sys.path_importer_cache.clear()
    gc.collect()
    gc.freeze()  # the children's collector leaves these pages alone: they stay shared
    order = Zygote(launcher, base_path).run()
    if order is not None:
        launcher.close()
        child.become(order)
