"""What else the machine is doing: said beside figures, and waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

LOOK_S = 0.5
"""How long to look at a machine to say that it is quiet."""


def busy_s() -> float:
    """CPU time that anything took on this machine so far, and that its host withheld."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Of one process and its children that it waited for; nothing when it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Others:
    """The share of the cores that others took since this was made; `pids` and this process are not others."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._began_s, self._busy_s, self._own_s = time.monotonic(), busy_s(), self._ours_s()

    def _ours_s(self) -> float:
        return sum(map(cpu_s, self._pids)) + sum(os.times()[:4])

    def share(self) -> float:
        elapsed_s = (time.monotonic() - self._began_s) * (os.cpu_count() or 1)
        return max(0.0, (busy_s() - self._busy_s - self._ours_s() + self._own_s) / elapsed_s)


def wait_for_quiet(share: float, limit_s: float) -> None:
    """Until nothing takes more than that share of the cores, or the limit is over: what follows says what it met."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        others = Others(())
        time.sleep(LOOK_S)
        if others.share() <= share:
            return
