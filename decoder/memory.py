"""The memory that this process may use. A large load checks it first, so that a shortage gives an error message."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still use: the least that the machine and its cgroups have left."""
    return min([_of_the_machine(proc, "MemAvailable"), *(left for _, left in _group_limits(proc, cgroups))])


def total_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of the machine's memory, or the lowest limit of this process's control groups if that is less.

    The result includes memory in use.
    """
    return min([_of_the_machine(proc, "MemTotal"), *(limit for limit, _ in _group_limits(proc, cgroups))])


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for huge pages, which take fewer entries in the TLB. A kernel without huge pages ignores the request."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def _of_the_machine(proc: Path, wanted: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == wanted:
            return int(value.split()[0]) * 1024
    raise OSError(f"{proc}/meminfo has no {wanted}")


def _group_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield each group's limit, and its limit minus its use, from this process's control group up to the root.

    Control groups of version 1 and version 2 are read. Groups without a limit are left out.
    """
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits_upwards(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_upwards(cgroups / "memory", path, *files)


def _limits_upwards(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[tuple[int, int]]:
    # In a container, the path may be a path of the host, and the mount may show only the container's own groups. Then
    # only the root exists here.
    group = root / path.lstrip("/")
    for directory in (group, *group.parents):
        found = _limit(directory / limit, directory / usage, directory / "memory.stat", reclaimable)
        if found is not None:
            yield found
        if directory == root:
            return


def _limit(limit: Path, usage: Path, statistics: Path, reclaimable: str) -> tuple[int, int] | None:
    """Return the group's limit, and its limit minus its use, in bytes. None: the group has no limit, or no
    file `limit`.

    Cache that the kernel can reclaim does not count as use.
    """
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return None
    cache = 0
    for line in statistics.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == reclaimable:
            cache = int(value)
    return int(text), int(text) - int(usage.read_text()) + cache
