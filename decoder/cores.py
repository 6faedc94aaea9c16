"""The number of cores that this process may use, and the name of the processor."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path


def available_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that the affinity mask and the quotas of cgroups leave to this process."""
    cores = len(os.sched_getaffinity(0))
    return max(1, int(min([cores, *_quotas(proc, cgroups)])))


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name and the number of cores for this process, as one text."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {available_cores()} cores"


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """Yield the CPU quota, in cores, of each control group (version 1 or 2) from this process's group up to the root.

    Groups without a quota are left out.
    """
    for line in (proc / "self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroups
        elif "cpu" in controllers.split(","):
            root = cgroups / "cpu"
        else:
            continue
        # In a container, the path may be a path of the host, and the mount may show only the container's own groups.
        # Then only the root exists here.
        group = root / path.lstrip("/")
        for directory in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            quota = _quota(directory)
            if quota is not None:
                yield quota


def _quota(group: Path) -> float | None:
    """Return the group's quota in cores. None: the group has no quota, or no file that states it."""
    v2, v1 = group / "cpu.max", group / "cpu.cfs_quota_us"
    if v2.exists():
        quota, period = v2.read_text(encoding="ascii").split()
    elif v1.exists():
        quota, period = v1.read_text(encoding="ascii"), (group / "cpu.cfs_period_us").read_text(encoding="ascii")
    else:
        return None
    return None if quota.strip() in {"max", "-1"} else int(quota) / int(period)
