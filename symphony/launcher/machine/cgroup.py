"""Cgroups: the kernel's limits on all processes of a program together.

Each program gets a cgroup if the launcher may make cgroups. These cgroups are siblings, each with the default weight
of one process. So a program with a thousand busy processes gets no more processor time than the daemon, which is one
process.

In version 2, a cgroup that limits its children may not contain processes itself. So the launcher moves to a leaf,
`launcher`, together with its own child processes. The launcher moves no other process: if the cgroup contains another
process, programs get no limits. In a cgroup that the service manager has delegated, all processes belong to one
service, so the launcher moves them all.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from symphony.launcher.common.places import Refused
from symphony.launcher.machine.hierarchies import KINDS, V1, V2, Hierarchy, find

log = logging.getLogger(__name__)

_LEAF = "launcher"
_MOST_USED = "memory.memsw.max_usage_in_bytes", "memory.max_usage_in_bytes"
"""Files with the peak memory use, for version 1. Version 1's own count of reached limits is unreliable.
The first file exists only if the kernel counts swap.
"""
_BATCH_BYTES = 64 * 4096
"""Largest error of the kernel's memory count. The kernel charges memory in batches."""
_REMOVALS, _REMOVE_AGAIN_S = 200, 0.05
"""Attempts to remove a group, and the pause between them. The kernel frees a killed task's resources with a delay."""
_OOM_LOOKS, _OOM_LOOK_AGAIN_S = 100, 0.01
"""Checks for a kill, and the pause between them. The kernel reports a lack of memory before it kills a process."""


@dataclass(slots=True)
class Group:
    """Cgroups of one program, with a cgroup in each usable hierarchy."""

    directories: list[str]
    """Directories of the group. A process enters by writing `0` to `cgroup.procs` of each."""
    _memory: Hierarchy | None
    """Hierarchy that limits the group's memory. None: there is no limit."""
    _pids: Path | None
    _told: int | None = None
    """Eventfd on which the kernel reports a lack of memory."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def limits_memory(self) -> bool:
        """Whether the kernel limits the group's memory."""
        return self._memory is not None

    def num_tasks(self) -> int | None:
        """Return the number of the program's processes and threads. None: no hierarchy counts them."""
        return None if self._pids is None else _number(self._pids / "pids.current")

    def ran_out_of_memory(self) -> bool:
        """Return whether the group reached its limit, and the kernel killed a process in it.

        If the kernel kills a process below the limit, the whole machine lacked memory. Then the program is not to
        blame.
        """
        if self._memory is None:
            return False
        events = _events(self._memory)
        return events["oom_kill"] > 0 and (events["oom"] > 0 if self._memory.files is V2 else self._was_full())

    def _was_full(self) -> bool:
        assert self._memory is not None
        directory = self._memory.directory
        most = next(path for name in _MOST_USED if (path := directory / name).exists())
        return _number(most) + _BATCH_BYTES > _number(directory / self._memory.files.memory)

    def watch_memory(self, on_lack: Callable[[], None]) -> None:
        """Call `on_lack` when the kernel has killed a process of the group for lack of memory.

        Only version 1 needs this: there, the kernel may leave the first process alive. In version 2, the kernel kills
        all processes of the group, or none.
        """
        if self._memory is None or self._memory.files is V2:
            return
        directory = self._memory.directory
        self._told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        watched = os.open(directory / self._memory.files.events, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _write(directory / "cgroup.event_control", f"{self._told} {watched}")
        finally:
            os.close(watched)
        asyncio.get_running_loop().add_reader(self._told, self._hear, on_lack)

    def _hear(self, on_lack: Callable[[], None]) -> None:
        """Handle a report on the eventfd.
        A report may also mean that the machine lacks memory, or that the group is removed.
        """
        assert self._told is not None
        os.eventfd_read(self._told)
        task = asyncio.get_running_loop().create_task(self._see(on_lack))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see(self, on_lack: Callable[[], None]) -> None:
        for _ in range(_OOM_LOOKS):
            if self._told is None:
                return
            if self.ran_out_of_memory():
                on_lack()
                return
            await asyncio.sleep(_OOM_LOOK_AGAIN_S)

    async def remove(self) -> None:
        """Remove the group. All of its processes must have ended."""
        if self._told is not None:
            asyncio.get_running_loop().remove_reader(self._told)
            os.close(self._told)
            self._told = None
        for directory in self.directories:
            for _ in range(_REMOVALS):
                if _is_removed(directory):
                    break
                await asyncio.sleep(_REMOVE_AGAIN_S)
            else:
                log.warning("the cgroup %s stays: it still has processes", directory)


class Cgroups:
    """Maker of programs' cgroups, in the hierarchies where this launcher may make them."""

    def __init__(self, prefix: str, hierarchies: list[Hierarchy]) -> None:
        self._prefix = prefix
        self._hierarchies = hierarchies
        self.kinds = frozenset[str]().union(*(each.kinds for each in hierarchies))

    @classmethod
    def find(cls, key: str, process: Path = Path("/proc/self")) -> Cgroups:
        """Find the hierarchies in which this launcher may make groups, and remove groups that an earlier launcher left.

        `key`: part of the groups' names. Only launchers with the same directory have the same key.
        """
        prefix = f"symphony-{key}-"
        usable = []
        for hierarchy in find(process):
            try:
                if hierarchy.files is V2:
                    _share(hierarchy)
                _try(hierarchy, prefix)
            except OSError as error:
                log.info("%s: no cgroups for programs: %s", hierarchy.directory, error.strerror)
                continue
            usable.append(hierarchy)
            for left in hierarchy.directory.glob(f"{prefix}*"):
                _is_removed(str(left))
        found = cls(prefix, usable)
        log.info("limits by cgroups: %s", ", ".join(kind for kind in KINDS if kind in found.kinds) or "none")
        return found

    def make(self, name: str, memory: int | None, tasks: int | None) -> Group:
        """Make a group with a limit of `memory` bytes and of `tasks` processes and threads. None: no limit.
        Refused: the group can't be made.
        """
        made, of_memory, of_pids = list[str](), None, None
        try:
            for hierarchy in self._hierarchies:
                directory = hierarchy.directory / f"{self._prefix}{name}"
                directory.mkdir()
                made.append(str(directory))
                if "memory" in hierarchy.kinds and memory is not None:
                    of_memory = Hierarchy(directory, hierarchy.kinds, hierarchy.files)
                    _limit_memory(of_memory, memory)
                if "pids" in hierarchy.kinds:
                    of_pids = directory
                    _write(directory / "pids.max", "max" if tasks is None else str(tasks))
        except OSError as error:
            for each in made:
                _is_removed(each)
            raise Refused(f"no cgroup can be made for the program: {error.filename}: {error.strerror}") from None
        return Group(made, of_memory, of_pids)


def _share(hierarchy: Hierarchy) -> None:
    """Move this launcher's processes to a leaf, and enable limits for child groups.
    OSError: other processes are in the cgroup, or this process lacks the right.
    """
    control = hierarchy.directory / "cgroup.subtree_control"
    missing = hierarchy.kinds - set(control.read_text(encoding="ascii").split())
    if not missing:
        return
    leaf = hierarchy.directory / _LEAF
    leaf.mkdir(exist_ok=True)
    moved = _ours(hierarchy.directory)
    _move(moved, leaf)
    try:
        _write(control, " ".join(f"+{kind}" for kind in sorted(missing)))
    except OSError:
        _move(moved, hierarchy.directory)
        _is_removed(str(leaf))
        raise


def _ours(directory: Path) -> list[str]:
    """Return the processes to move: this process and its children, or all in the cgroup if the cgroup is delegated."""
    here = (directory / "cgroup.procs").read_text(encoding="ascii").split()
    others = [pid for pid in here if pid != str(os.getpid())]
    return ["0", *(pid for pid in others if _is_delegated(directory) or _parent(pid) == os.getpid())]


def _is_delegated(directory: Path) -> bool:
    """Return whether the service manager has delegated the cgroup to a service."""
    try:
        return os.getxattr(directory, "user.delegate") == b"1"
    except OSError:
        return False


def _parent(pid: str) -> int | None:
    """Return the pid of a process's parent. None: the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _move(pids: list[str], directory: Path) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            _write(directory / "cgroup.procs", pid)


def _try(hierarchy: Hierarchy, prefix: str) -> None:
    """Make a group and remove it again, as a test. OSError: this hierarchy allows no group with limits."""
    directory = hierarchy.directory / f"{prefix}try"
    directory.mkdir(exist_ok=True)
    try:
        for name in ("cgroup.procs", hierarchy.files.memory, "pids.max"):
            kind = name.partition(".")[0]
            if kind == "cgroup" or kind in hierarchy.kinds:
                os.close(os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC))
    finally:
        directory.rmdir()


def _limit_memory(group: Hierarchy, memory: int) -> None:
    """Limit the memory of a group, including swap if the kernel counts it.
    In version 2, also have the kernel kill all processes of the group together.
    """
    _write(group.directory / group.files.memory, str(memory))
    with_swap = group.directory / group.files.with_swap
    if with_swap.exists():
        _write(with_swap, str(memory) if group.files is V1 else "0")
    if group.files is V2:
        _write(group.directory / "memory.oom.group", "1")


def _events(group: Hierarchy) -> dict[str, int]:
    lines = (group.directory / group.files.events).read_text(encoding="ascii").splitlines()
    return {name: int(number) for name, _, number in (line.partition(" ") for line in lines)}


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


def _write(path: Path, text: str) -> None:
    """Write to a file of the cgroup file system. OSError names the file."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(file)


def _is_removed(directory: str) -> bool:
    """Remove a group. False: the group still contains processes or groups."""
    with suppress(FileNotFoundError):
        try:
            Path(directory).rmdir()
        except OSError:
            return False
    return True
