"""Where this process may make cgroups: its own directory in each hierarchy that the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = "memory", "pids", "cpu"


@dataclass(frozen=True, slots=True)
class Files:
    """The names that a version of cgroups has for its files."""

    memory: str
    with_swap: str
    """Not there where swap is not counted."""
    used: str
    events: str
    """One of its lines is `oom_kill N`."""


V1 = Files("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
V2 = Files("memory.max", "memory.swap.max", "memory.current", "memory.events")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A directory where groups for programs can be made, and the kinds of limits that they then have."""

    directory: Path
    kinds: frozenset[str]
    files: Files


def find(process: Path) -> list[Hierarchy]:
    """Those of the process whose directory in /proc is given, the ones of version 1 first. Nobody knows yet whether it
    may write there.
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
    """The cgroup that it shows."""
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
    r"""As the kernel means it: a space is \040."""
    return text.encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1").decode("utf-8")


def _directory(own: str, mounts: list[_Mount]) -> Path | None:
    """Of the cgroup `own`, where one of the mounts shows it."""
    for mount in mounts:
        inside = os.path.relpath(own, mount.root)
        directory = mount.point / inside
        if not inside.startswith("..") and directory.is_dir():
            return directory
    return None
