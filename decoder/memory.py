"""How much memory this process may take: asked before a large load, so that it fails with a sentence."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of what the machine has available and what the control groups of this process leave."""
    return min([_of_the_machine(proc, "MemAvailable"), *(left for _, left in _group_limits(proc, cgroups))])


def total_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of what the machine has and of the limits of this process's control groups, whatever is in use."""
    return min([_of_the_machine(proc, "MemTotal"), *(limit for limit, _ in _group_limits(proc, cgroups))])


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Fewer, larger entries in the TLB, where the kernel has them."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def _of_the_machine(proc: Path, wanted: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == wanted:
            return int(value.split()[0]) * 1024
    raise OSError(f"{proc}/meminfo has no {wanted}")


def _group_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit, and limit less use, of every group from this process's own up to the root; version 2 and version 1."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits_upwards(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_upwards(cgroups / "memory", path, *files)


def _limits_upwards(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[tuple[int, int]]:
    # In a container the path may be the host's while the mount shows only our part: then just the root is there.
    group = root / path.lstrip("/")
    for directory in (group, *group.parents):
        found = _limit(directory / limit, directory / usage, directory / "memory.stat", reclaimable)
        if found is not None:
            yield found
        if directory == root:
            return


def _limit(limit: Path, usage: Path, statistics: Path, reclaimable: str) -> tuple[int, int] | None:
    """None where the group has no limit, or the kernel shows none."""
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return None
    cache = 0
    for line in statistics.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == reclaimable:
            cache = int(value)
    return int(text), int(text) - int(usage.read_text()) + cache
