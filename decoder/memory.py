"""How much memory this process may still take: asked before a large load, so that it fails with a sentence."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of what the machine has available and what the control groups of this process leave."""
    return min([_machine_available(proc), *_group_headrooms(proc, cgroups)])


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Fewer, larger entries in the TLB, where the kernel has them."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def _machine_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{proc}/meminfo has no MemAvailable")


def _group_headrooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """Limit less use of every group from this process's own up to the root; version 2 and version 1."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _headrooms_upwards(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _headrooms_upwards(cgroups / "memory", path, *files)


def _headrooms_upwards(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    # In a container the path may be the host's while the mount shows only our part: then just the root is there.
    group = root / path.lstrip("/")
    for directory in (group, *group.parents):
        headroom = _headroom(directory / limit, directory / usage, directory / "memory.stat", reclaimable)
        if headroom is not None:
            yield headroom
        if directory == root:
            return


def _headroom(limit: Path, usage: Path, statistics: Path, reclaimable: str) -> int | None:
    """None where the group has no limit, or the kernel shows none."""
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return None
    cache = 0
    for line in statistics.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == reclaimable:
            cache = int(value)
    return int(text) - int(usage.read_text()) + cache
