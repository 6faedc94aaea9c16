"""Functions on processes: read their children, memory and environment from /proc, and send them signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ZYGOTE_OF = "SYMPHONY_ZYGOTE_OF"
"""Environment variable of a zygote, with the launcher's directory."""
PROGRAM = "SYMPHONY_PROGRAM"
"""Environment variable of a program, with its id."""
_GONE = (FileNotFoundError, ProcessLookupError)


def children(pid: int) -> list[int]:
    """Return the children of all threads of `pid`. A process that has ended has no children."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - faster
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:  # noqa: PTH123 - faster
                found += map(int, file.read().split())
    except _GONE:
        pass
    return found


def descendants(roots: Iterable[int]) -> list[int]:
    """Return `roots` together with all their descendants."""
    found, todo = list[int](), list(roots)
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children(pid)
    return found


def end_tree(pid: int) -> bool:
    """Kill all descendants of `pid`. Return whether there was a descendant, even a zombie."""
    return sum(send_signal(each, signal.SIGKILL) for each in descendants(children(pid))) > 0


def reap() -> None:
    """Reap children that have ended, and ignore their statuses."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process. False: the process has ended, or is another user's, like a child of sudo(8)."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def send_group_signal(pid: int, number: int) -> bool:
    """Send a signal to the process group with the number `pid`. False: the group has ended."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True


def left_by(launcher: str, programs: Collection[str]) -> list[int]:
    """Return the processes that a dead launcher left: its zygote, the zygote's forks, and its programs' processes.

    Their environments identify these processes. /proc shows the environment of a process's last exec, so a fork of the
    zygote shows the zygote's environment.
    """
    marks = {os.fsencode(f"{ZYGOTE_OF}={launcher}"), *(os.fsencode(f"{PROGRAM}={each}") for each in programs)}
    everybody = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names are needed
    return [pid for pid in everybody if not marks.isdisjoint(_environment(pid))]


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - faster
            return file.read().split(b"\0")
    except (*_GONE, PermissionError):
        return []


def memory_bytes(pids: Iterable[int], limit_bytes: int) -> int:
    """Return the memory of processes together. The result is exact only if it is above `limit_bytes`.

    Resident sizes are cheap to read, but count a shared page once for each process. Only if their sum exceeds the
    limit, proportional sizes are read instead.
    """
    pids = list(pids)
    resident = sum(map(_resident_bytes, pids))
    return resident if resident <= limit_bytes else sum(map(_proportional_bytes, pids))


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123 - faster
            return int(file.read().split()[1]) * _PAGE_BYTES
    except _GONE:
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:  # noqa: PTH123 - faster
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (*_GONE, PermissionError):
        pass
    return 0
