"""What /proc says of processes: who descends from whom, and how much memory they have."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ZYGOTE_OF = "SYMPHONY_ZYGOTE_OF"
"""In the environment of a zygote: the launcher's directory."""
PROGRAM = "SYMPHONY_PROGRAM"
"""In that of a program: its id."""
_GONE = (FileNotFoundError, ProcessLookupError)


def children(pid: int) -> list[int]:
    """Of all threads of `pid`; none, when it has gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - often
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:  # noqa: PTH123 - often
                found += map(int, file.read().split())
    except _GONE:
        pass
    return found


def descendants(roots: Iterable[int]) -> list[int]:
    """`roots` and all below them."""
    found, todo = list[int](), list(roots)
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children(pid)
    return found


def end_tree(pid: int) -> bool:
    """Kills all descendants of `pid`; whether any were ours to kill, zombies included."""
    return sum(send_signal(each, signal.SIGKILL) for each in descendants(children(pid))) > 0


def reap() -> None:
    """Takes note of children that have ended, where nobody asks how."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def send_signal(pid: int, number: int) -> bool:
    """Whether the process was there, and this user's: one that sudo(8) made is not."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def send_group_signal(pid: int, number: int) -> bool:
    """To the process group that `pid` leads, or led."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True


def left_by(launcher: str, programs: Collection[str]) -> list[int]:
    """Processes of a launcher that has gone: its zygote and what was forked from it, and what its programs executed.

    /proc shows the environment that a process was executed with, so that of the zygote in all that it forked.
    """
    marks = {os.fsencode(f"{ZYGOTE_OF}={launcher}"), *(os.fsencode(f"{PROGRAM}={each}") for each in programs)}
    everybody = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names
    return [pid for pid in everybody if not marks.isdisjoint(_environment(pid))]


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - often
            return file.read().split(b"\0")
    except (*_GONE, PermissionError):
        return []


def memory_bytes(pids: Iterable[int], limit_bytes: int) -> int:
    """What processes have in memory together, exact where it is beyond `limit_bytes`.

    Resident sizes are cheap to ask for, and count pages that processes share for each of them. Only where their sum is
    too much are proportional sizes asked for.
    """
    pids = list(pids)
    resident = sum(map(_resident_bytes, pids))
    return resident if resident <= limit_bytes else sum(map(_proportional_bytes, pids))


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123 - often
            return int(file.read().split()[1]) * _PAGE_BYTES
    except _GONE:
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:  # noqa: PTH123 - often
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (*_GONE, PermissionError):
        pass
    return 0
