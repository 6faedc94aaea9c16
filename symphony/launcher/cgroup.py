"""Cgroups: the kernel's own limits on all processes of a program together. There is one for each program, where the
launcher may make any.

Groups lie flat beside each other, each with the weight that one process has by default. So a program with a thousand
busy processes gets no more of the processors than the daemon, which is one.

In version 2 a cgroup with limits below it may have no processes itself. So the launcher moves to a leaf, `launcher`,
with what it has started. It moves nobody else: with others in its cgroup there are no limits. But where a service
manager has delegated the cgroup, all that is in it is of the same service, and moves, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from symphony.launcher.hierarchies import KINDS, V1, V2, Hierarchy, find
from symphony.launcher.places import Refused

log = logging.getLogger(__name__)

_LEAF = "launcher"
_MOST_USED = "memory.memsw.max_usage_in_bytes", "memory.max_usage_in_bytes"
"""Version 1, which has no good count of how often a limit was met. The first is there where swap is counted."""
_BATCH_BYTES = 64 * 4096
"""The kernel counts that many at once."""
_REMOVALS, _REMOVE_AGAIN_S = 200, 0.05
"""The kernel holds what a killed task had until it is done with it."""
_OOM_LOOKS, _OOM_LOOK_AGAIN_S = 100, 0.01
"""It tells of the lack before it kills."""


@dataclass(slots=True)
class Group:
    """What holds one program."""

    directories: list[str]
    """To enter it, a process writes `0` to `cgroup.procs` of each."""
    _memory: Hierarchy | None
    """Where its memory has a limit."""
    _pids: Path | None
    _told: int | None = None
    """The descriptor that tells of a lack of memory."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def limits_memory(self) -> bool:
        """The kernel keeps its memory below the limit."""
        return self._memory is not None

    def memory_bytes(self) -> int | None:
        """What it uses, with files that the kernel keeps in memory for it; None: nobody counts."""
        if self._memory is None:
            return None
        return _number(self._memory.directory / self._memory.files.used)

    def num_tasks(self) -> int | None:
        """Its processes and threads; None: nobody counts."""
        return None if self._pids is None else _number(self._pids / "pids.current")

    def ran_out_of_memory(self) -> bool:
        """It was at its limit, and the kernel has killed something in it.

        Without the first it was the machine that had no memory left, which is not its fault.
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
        """Calls `on_lack` when it ran out of memory and its first process may go on.

        In version 2 it may not: the kernel kills all that are in the group, or nobody.
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
        """The kernel says the same when the machine lacks memory, or the group is removed."""
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
        """When all of its processes have ended."""
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
    """Makes groups, of the kinds that can be had."""

    def __init__(self, prefix: str, hierarchies: list[Hierarchy]) -> None:
        self._prefix = prefix
        self._hierarchies = hierarchies
        self.kinds = frozenset[str]().union(*(each.kinds for each in hierarchies))

    @classmethod
    def find(cls, key: str, process: Path = Path("/proc/self")) -> Cgroups:
        """Tries which there are; `key` is this launcher's alone. What an earlier one with that key left is removed."""
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
        """A group that holds its processes to so many bytes together, and so many processes and threads. Refused: the
        kernel makes no more.
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
    """Lets groups below have limits, which takes this process to a leaf. OSError: others are here, or it may not."""
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
    """The processes of a cgroup that may be moved: this one, its children; where it is delegated, all."""
    here = (directory / "cgroup.procs").read_text(encoding="ascii").split()
    others = [pid for pid in here if pid != str(os.getpid())]
    return ["0", *(pid for pid in others if _is_delegated(directory) or _parent(pid) == os.getpid())]


def _is_delegated(directory: Path) -> bool:
    """A service manager has given it away, as a whole."""
    try:
        return os.getxattr(directory, "user.delegate") == b"1"
    except OSError:
        return False


def _parent(pid: str) -> int | None:
    """None: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _move(pids: list[str], directory: Path) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            _write(directory / "cgroup.procs", pid)


def _try(hierarchy: Hierarchy, prefix: str) -> None:
    """OSError: no group can be made there."""
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
    """Swap included, where that is counted. All processes end together, where the kernel can do that."""
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
    """Into a file that the kernel made. OSError names it."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(file)


def _is_removed(directory: str) -> bool:
    """Whether it is no more there; it stays while something is in it."""
    with suppress(FileNotFoundError):
        try:
            Path(directory).rmdir()
        except OSError:
            return False
    return True
