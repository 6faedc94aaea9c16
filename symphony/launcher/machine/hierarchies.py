"""Finds the cgroup hierarchies of the machine, and the directory of a process in each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = "memory", "pids", "cpu"


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """Names of files in one version of cgroups."""

    memory: str
    with_swap: str
    """File with the limit on swap, which is missing if the kernel does not count swap."""
    events: str
    """File with counts of memory events, including a line `oom_kill N`."""


V1 = CgroupFiles("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control")
V2 = CgroupFiles("memory.max", "memory.swap.max", "memory.events")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Directory in which programs' groups can be made, and the kinds of limits that these groups can have."""

    directory: Path
    kinds: frozenset[str]
    files: CgroupFiles


def find(process: Path) -> list[Hierarchy]:
    """Return the hierarchies of a process, version 1 first. `process`: the process's directory in /proc.
    The process may lack the right to write there.
    """
    mounts = list(_mounts(process / "mountinfo"))
    found = dict[Path, set[str]]()
    unified = None
    for line in (process / "cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, own = line.split(":", 2)
        if number == "0":
            unified = _directory(own, [mount for mount in mounts if mount.type == "cgroup2"])
            continue
        for kind in set(controllers.split(",")) & set(KINDS):
            directory = _directory(own, [mount for mount in mounts if mount.type == "cgroup" and kind in mount.options])
            if directory is not None:
                found.setdefault(directory, set()).add(kind)
    hierarchies = [Hierarchy(directory, frozenset(kinds), V1) for directory, kinds in found.items()]
    if unified is not None:
        kinds = frozenset((unified / "cgroup.controllers").read_text(encoding="ascii").split()) & frozenset(KINDS)
        hierarchies += [Hierarchy(unified, kinds, V2)] if kinds else []
    return hierarchies


@dataclass(frozen=True, slots=True)
class _Mount:
    type: str
    root: str
    """Cgroup that is the root of the mount."""
    point: Path
    options: list[str]


def _mounts(path: Path) -> Iterator[_Mount]:
    for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, point = before.split(" ")[3:5]
            yield _Mount(kind, root, Path(_unescaped(point)), options.split(","))


def _unescaped(text: str) -> str:
    r"""Decode the escapes of a path in mountinfo: a space is \040."""
    return text.encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1").decode("utf-8")


def _directory(own: str, mounts: list[_Mount]) -> Path | None:
    """Return the directory of the cgroup `own` in one of the mounts. None: the cgroup is in no mount."""
    for mount in mounts:
        inside = os.path.relpath(own, mount.root)
        directory = mount.point / inside
        if not inside.startswith("..") and directory.is_dir():
            return directory
    return None
