"""The zygote: a Python process that has loaded libsym, and makes programs by fork(2).

The zygote has a single thread. Of a launch, the zygote knows only the serial number `n`. The rest arrives as
descriptors for the child: a memfd with the specification, a pipe for the report, and standard input, output and error.

Messages between zygote and launcher are JSON on a SOCK_SEQPACKET pair:

    launcher → zygote   {"n": 7, "sandbox": true} and the descriptors
    zygote → launcher   {"n": 7, "pid": 4711} or {"n": 7, "error": text}; later {"pid": 4711, "status": N}
                        with N as in waitpid(2)

With a sandbox, the pid is that of its first process, and the status is that of the program, as the first process
reports it.

When the launcher ends in any way, the zygote ends all programs and itself. When the zygote ends, the kernel ends all
programs.
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

import libsym  # noqa: F401 - loaded here once, for all programs
from symphony.launcher.machine import system
from symphony.launcher.machine.processes import children, descendants, end_tree, send_signal
from symphony.launcher.sandbox.enter import END_BYTES, Outside, clone, ends
from symphony.launcher.sandbox.lacks import Lacks
from symphony.launcher.sandbox.view import system_view
from symphony.launcher.zygote import child

MAX_DESCRIPTORS = 6
"""Descriptors of a launch: the specification, the report, the three standard streams, and a door for grants."""
_MAX_MESSAGE_BYTES = 4096
KILL_AGAIN_S = 0.001
"""Pause between rounds of killing. Rounds are needed, since a process may fork while it is being killed."""
ORPHANS_S = 0.02
"""Time limit of killing orphans at one program's end, since other programs wait to be started.
The end of the next program continues the killing.
"""


class Zygote:
    """The zygote. `base_path`: sys.path of programs, without the entries that the launcher added."""

    def __init__(self, launcher: socket.socket, base_path: list[str]) -> None:
        self._launcher = launcher
        self._base_path = base_path
        self._pid = os.getpid()
        self._programs: set[int] = set()
        """Pids of children that have not ended."""
        self._told: set[int] = set()
        """Pids that the launcher knows, and whose end is not reported yet."""
        self._launches: dict[int, int] = {}
        """Serial number of the launch, by the pid of the sandbox's first process."""
        self._statuses: dict[int, int] = {}
        """Status of a program as reported by its first process, by the serial number of the launch."""
        self._said, self._say = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._said, False)
        self._user = os.getuid(), os.getgid()
        self._wakes, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def run(self) -> child.Order | None:
        """Serve until the launcher ends, then return None. In a forked child, return the order for its program."""
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
        """Kill the orphans of programs that have ended, then report the programs.
        All children that are not programs are such orphans.
        """
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
        """Return the status of a program: `status`, or in a sandbox the status that the first process reported."""
        number = self._launches.pop(pid, None)
        if number is None:
            return status
        with suppress(BlockingIOError):
            while said := os.read(self._said, 100 * END_BYTES):
                self._statuses.update(ends(said))
        return self._statuses.pop(number, status)

    def _end_orphans(self) -> bool:
        """Kill all orphans. Return whether an orphan was found. If so, call again: the orphan may have forked."""
        orphans = descendants(set(children(self._pid)) - self._programs)
        return sum(send_signal(orphan, signal.SIGKILL) for orphan in orphans) > 0

    def _send(self, message: dict[str, int | str]) -> None:
        try:
            self._launcher.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self._end_all()
            sys.exit(0)

    def _end_all(self) -> None:
        """Kill all programs, since the launcher is gone."""
        while end_tree(self._pid):
            list(_ended())
            time.sleep(KILL_AGAIN_S)


def _ended() -> Iterator[tuple[int, int]]:
    """Reap children that have ended, and yield their pids and statuses."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def receive_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a message with its descriptors. No bytes: the peer has closed the connection."""
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
    """Run a zygote on the socket `descriptor`. Programs don't get the entries that the launcher added to sys.path."""
    launcher = socket.socket(fileno=descriptor)
    launcher.set_inheritable(False)
    system.adopt_orphans()
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base_path = [entry for entry in sys.path if entry not in added]
    system_view()
    os.environ.clear()  # cleared once, instead of in each child
    sys.path_importer_cache.clear()
    gc.collect()
    gc.freeze()  # collections in children do not touch frozen objects, so their pages stay shared
    order = Zygote(launcher, base_path).run()
    if order is not None:
        launcher.close()
        child.become(order)
