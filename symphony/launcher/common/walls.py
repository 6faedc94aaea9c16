"""Default limits of isolated programs, and functions by which a process puts itself under the kernel's limits."""

from __future__ import annotations

import os
from collections.abc import Iterable

MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
"""Default memory limit: half of the machine's memory, so that one program leaves memory for the daemon."""
TASKS = 1024
"""Default limit on processes and threads together."""
MOST_TASKS = 1 << 22
"""Upper bound of the tasks on a Linux machine."""
OOM_SCORE_ADJ = 1000
"""OOM score of isolated processes. If the machine lacks memory, the kernel kills them before all other processes."""


def descriptors(most: int) -> int:
    """Return a program's limit on descriptors. `most`: the launcher's limit.

    The kernel counts the descriptors that are in flight in sockets for all processes of a user together. With this
    lower limit, a program can't use up the descriptors that the launcher needs to start another program.
    """
    return most // 2


def enter(cgroups: Iterable[str]) -> None:
    """Move this process into cgroups. OSError names the cgroup that refuses it."""
    for directory in cgroups:
        _write(f"{directory}/cgroup.procs", "0")


def go_first(oom_score_adj: int) -> None:
    """Set this process's OOM score. If memory runs out, the kernel kills it before processes with a lower score."""
    _write("/proc/self/oom_score_adj", str(oom_score_adj))


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(file)
