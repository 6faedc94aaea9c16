"""How many cores this process may use, and of what."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path


def available_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Its affinity mask, cut by the quotas of its control groups."""
    cores = len(os.sched_getaffinity(0))
    return max(1, int(min([cores, *_quotas(proc, cgroups)])))


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Its name, and how many cores of it there are for this process."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {available_cores()} cores"


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """Cores' worth of CPU time of every group from this process's own up to the root; version 2 and version 1."""
    for line in (proc / "self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroups
        elif "cpu" in controllers.split(","):
            root = cgroups / "cpu"
        else:
            continue
        # In a container the path may be the host's while the mount shows only our part: then just the root is there.
        group = root / path.lstrip("/")
        for directory in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            quota = _quota(directory)
            if quota is not None:
                yield quota


def _quota(group: Path) -> float | None:
    """None where the group has no limit, or the kernel shows none."""
    v2, v1 = group / "cpu.max", group / "cpu.cfs_quota_us"
    if v2.exists():
        quota, period = v2.read_text(encoding="ascii").split()
    elif v1.exists():
        quota, period = v1.read_text(encoding="ascii"), (group / "cpu.cfs_period_us").read_text(encoding="ascii")
    else:
        return None
    return None if quota.strip() in {"max", "-1"} else int(quota) / int(period)
