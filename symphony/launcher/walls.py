"""The limits that isolated programs have without asking for any, and how a process takes on those of the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable

MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
"""Half of what the machine has: one program can't take the daemon's."""
TASKS = 1024
"""Processes and threads together."""
MOST_TASKS = 1 << 22
"""So many a machine can have."""
OOM_SCORE_ADJ = 1000
"""Where the machine lacks memory the kernel ends such a process before any other."""


def descriptors(most: int) -> int:
    """How many a program may have, where its launcher may have `most`.

    What all processes of a user have under way in sockets counts for each: one that may have fewer can't use up those
    that the launcher needs to start another.
    """
    return most // 2


def enter(cgroups: Iterable[str]) -> None:
    """Moves this process into the directories. OSError names the one that it can't enter."""
    for directory in cgroups:
        _write(f"{directory}/cgroup.procs", "0")


def go_first(oom_score_adj: int) -> None:
    """Where the machine lacks memory, and there are processes with less."""
    _write("/proc/self/oom_score_adj", str(oom_score_adj))


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(file)
