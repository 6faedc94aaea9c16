"""Sides of a comparison: each runs a script in a new directory of its own, and tells what happened."""

import os
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvfs.fs import FileSystem, OpenKv
from kvfs.names.inode import Credentials
from kvfs.names.walk import Paths
from libsym.errors import SymError
from tests.kvfs.conformance.operations import OPERATIONS
from tests.kvfs.conformance.script import OK, USERS, Case, Outcome, Step, User, name_of
from tests.kvfs.fakes import listing

_CLOCK_REALTIME_COARSE = 5
_DAY_NS = 86_400 * 10**9


class Side(Protocol):
    def run(self, case: Case, *, patient: bool) -> list[Outcome]:
        """Run a case. `patient`: let the coarse clock go on before each step."""


class Kernel:
    """A file system that the kernel serves.

    Root's real user stays; the effective one is the step's, which is what the kernel goes by (but for access(2)).
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._num_cases = 0

    def run(self, case: Case, *, patient: bool) -> list[Outcome]:
        before, mask = Path.cwd(), os.umask(0)
        where = self._root / f"case{self._num_cases}"
        self._num_cases += 1
        where.mkdir(mode=0o755)
        os.chdir(where)
        try:
            return Run(case, patient=patient).outcomes()
        finally:
            os.chdir(before)
            os.umask(mask)


def _become(user: User) -> None:
    if os.geteuid() == user.uid:
        return
    os.seteuid(0)
    os.setegid(user.gid)
    os.setgroups(user.groups)
    os.seteuid(user.uid)


class Run:
    """Run of a case on one file system, in the current directory."""

    def __init__(self, case: Case, *, patient: bool) -> None:
        self._case, self._patient = case, patient
        self._handles: dict[str, int] = {}
        self._seen: dict[int, tuple[int, int, int]] = {}  # times by inode number
        self._start_ns = time.time_ns()

    def outcomes(self) -> list[Outcome]:
        observed = False
        found = []
        try:
            for step in self._case.steps:
                if step.expected is not None and not observed:
                    self._observe()  # so that "changed" means: by this step
                    observed = True
                if self._patient:
                    _wait_for_the_coarse_clock()
                result = self._result(step)
                observed = step.expected is not None
                found.append(Outcome(result, self._observe() if observed else None))
        finally:
            for handle in self._handles.values():
                os.close(handle)
        return found

    def _result(self, step: Step) -> Any:
        codes, action = OPERATIONS[step.operation]
        coded = zip(codes, step.arguments, strict=False)
        arguments = [self._handles[str(word)] if code == "h" else word for code, word in coded]
        groups = os.getgroups()
        _become(step.user)
        try:
            result = action(*arguments)
        except OSError as error:
            return name_of(error.errno)
        finally:
            _become(USERS["root"])
            os.setgroups(groups)
        if step.operation == "hold":
            self._handles[str(step.arguments[0])] = result
        elif step.operation == "release":
            del self._handles[str(step.arguments[0])]
        elif isinstance(result, os.stat_result):
            return (*self._attributes(result), *(self._times(result) if step.operation == "fstat" else ()))
        elif result is not None:
            return result
        return OK

    def _observe(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        first_path: dict[int, str] = {}
        for path in self._case.paths:
            try:
                status = os.lstat(path)
            except OSError as error:
                found[path] = name_of(error.errno)
                continue
            same_as = first_path.setdefault(status.st_ino, path)
            found[path] = (*self._attributes(status), f"same as {same_as}", *self._times(status))
        return found

    @staticmethod
    def _attributes(status: os.stat_result) -> tuple[Any, ...]:
        size = "-" if stat.S_ISDIR(status.st_mode) else status.st_size
        return oct(status.st_mode), status.st_uid, status.st_gid, status.st_nlink, size, status.st_rdev

    def _times(self, status: os.stat_result) -> tuple[str, ...]:
        """Return each time if it was set, and whether it has changed since the last look."""
        now = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
        before = self._seen.get(status.st_ino)
        self._seen[status.st_ino] = now
        told = []
        for i, name in enumerate(("atime", "mtime", "ctime")):
            recent = abs(now[i] - self._start_ns) < _DAY_NS
            change = "new" if before is None else "changed" if now[i] != before[i] else "unchanged"
            if not recent:
                change = "set"
            told.append(f"{name} {'recent' if recent else now[i]} {change}")
        return tuple(told)


def _wait_for_the_coarse_clock() -> None:
    """Whatever a file system's clock is, what happens next is later than what happened before."""
    now = time.clock_gettime_ns(time.CLOCK_REALTIME)
    while time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) <= now:
        os.sched_yield()


class Gate:
    """The file system as calls of programs reach it. Its regular files are KV files.

    Steps without an expectation make what is there, whoever may. The calls of steps with one are those of the kernel
    that mean the same.
    """

    def __init__(self, fs: FileSystem) -> None:
        self._fs, self._tree, self._paths = fs, fs.volume.tree, Paths(fs.volume.tree)
        self._num_cases = 0

    def run(self, case: Case, *, patient: bool) -> list[Outcome]:
        self._tree.make(self._tree.root, b"case%d" % self._num_cases, stat.S_IFDIR, mode=0o755, uid=0, gid=0)
        found = [Outcome(self._result(step), self._observe(case) if step.expected else None) for step in case.steps]
        self._num_cases += 1
        return found

    def _result(self, step: Step) -> str:
        codes = OPERATIONS[step.operation][0]
        arguments = [
            f"case{self._num_cases}/{word}" if code == "p" else word
            for code, word in zip(codes, step.arguments, strict=False)
        ]
        if step.expected is None:
            self._prepare(step.operation, *arguments)
            return OK
        creds = Credentials(step.user.uid, step.user.gid, frozenset(step.user.groups))
        calls: dict[str, Callable[..., object]] = {
            "open": self._open,
            "unlink": self._fs.kv_remove,
            "ls": partial(listing, self._fs),
        }
        call = calls.get(step.operation) or getattr(self._fs, f"kv_{step.operation}")
        try:
            call(creds, *arguments)
        except SymError as error:
            return name_of(error.errno)
        return OK

    def _open(self, creds: Credentials, path: str, flags: int, mode: int = 0o777) -> None:
        """Open a file. With O_CREAT, open it or make it, as KV_CLAIM and KV_NAME do."""
        write = bool(flags & os.O_RDWR)
        if flags & os.O_EXCL:
            opened = self._fs.kv_create(creds, path, mode)
        elif flags & os.O_CREAT:
            found = self._fs.kv_open_or_claim(creds, path, write=write)
            if isinstance(found, OpenKv):
                opened = found
            else:
                self._fs.claims.acquire_nowait(found.key, found, exclusive=True)
                opened = self._fs.kv_create_claimed(creds, found, mode)
                self._fs.kv_name(creds, opened, write=write)
        else:
            opened = self._fs.kv_open(creds, path, write=write)
        self._fs.kv_close(opened)

    def _prepare(self, operation: str, *arguments: Any) -> None:
        root = Credentials(0, 0)
        match operation, arguments:
            case "make", ("regular", path):
                self._fs.kv_close(self._fs.kv_create(root, path, 0o644))
            case "mkdir", (path, mode):
                self._fs.kv_mkdir(root, path, mode)
            case "symlink", (target, path):
                place = self._paths.place(root, path)
                self._tree.make(
                    place.directory, place.name, stat.S_IFLNK, mode=0o777, uid=0, gid=0, target=target.encode()
                )
            case "chmod", (path, mode):
                self._paths.resolve(root, path).mode = mode
            case "chown", (path, uid, gid):
                inode = self._paths.resolve(root, path)
                self._fs.volume.change_owner(inode, uid)
                inode.gid = gid

    def _observe(self, case: Case) -> dict[str, Any]:
        """Names, modes and owners, as the kernel would tell root. Paths that end in a slash or dots are left out."""
        found: dict[str, Any] = {}
        for path in case.paths:
            if path.rpartition("/")[2] in {"", ".", ".."}:
                continue
            try:
                inode = self._paths.place(Credentials(0, 0), f"case{self._num_cases}/{path}").existing()
            except SymError as error:
                found[path] = name_of(error.errno)
            else:
                found[path] = oct(inode.file_type | inode.mode), inode.uid, inode.gid
        return found
