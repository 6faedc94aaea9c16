# ruff: noqa: PTH102, PTH116, PTH118, PTH208, PTH211 - the system calls are what is tested
"""A process that runs scripts on two file systems and tells what happened on each.

Root's real user stays; the effective one is the step's, which is what the kernel goes by (but for access(2)). Requests
are pickled: cases, and whether to be patient with coarse clocks. Answers are lists of pairs of lists of `Outcome`.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from tests.kvfs.conformance.script import OK, USERS, Case, Observation, Outcome, Step, User, name_of

_CLOCK_REALTIME_COARSE = 5
_DAY_NS = 86_400 * 10**9
_UTIME_NOW, _UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = -100, 0x100, 0x1000

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def become(user: User) -> None:
    os.seteuid(0)
    os.setegid(user.gid)
    os.setgroups(user.groups)
    os.seteuid(user.uid)


class Run:
    """Run of a case on one file system, in the current directory."""

    def __init__(self, case: Case, *, patient: bool) -> None:
        self._case = case
        self._patient = patient
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
            os.umask(0)
            for handle in self._handles.values():
                os.close(handle)
        return found

    def _result(self, step: Step) -> Any:
        action: Callable[..., Any] = getattr(self, f"do_{step.operation}")
        if step.user != USERS["root"]:
            become(step.user)
        try:
            result = action(*step.arguments)
        except OSError as error:
            return name_of(error.errno)
        finally:
            if step.user != USERS["root"]:
                become(USERS["root"])
        return OK if result is None else result

    # What is there

    def _observe(self) -> Observation:
        found: Observation = {}
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
        return oct(status.st_mode), status.st_nlink, status.st_uid, status.st_gid, size, status.st_rdev

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

    # Operations on paths

    def do_make(self, kind: str, path: str) -> None:
        """A file of a kind, as most cases need one."""
        if kind == "regular":
            self.do_create(path, 0o644)
        elif kind == "dir":
            os.mkdir(path, 0o755)
        elif kind == "symlink":
            os.symlink("test", path)
        elif kind == "socket":
            self.do_bind(path)
        elif kind != "none":
            kinds = {"fifo": stat.S_IFIFO, "block": stat.S_IFBLK, "char": stat.S_IFCHR}
            os.mknod(path, kinds[kind] | 0o644, os.makedev(1, 2))

    def do_create(self, path: str, mode: int) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK, mode))

    def do_open(self, path: str, flags: int, mode: int = 0o777) -> None:
        os.close(os.open(path, flags, mode))

    do_mkdir = staticmethod(os.mkdir)
    do_mkfifo = staticmethod(os.mkfifo)
    do_symlink = staticmethod(os.symlink)
    do_unlink = staticmethod(os.unlink)
    do_rmdir = staticmethod(os.rmdir)
    do_rename = staticmethod(os.rename)
    do_chmod = staticmethod(os.chmod)
    do_chown = staticmethod(os.chown)
    do_lchown = staticmethod(os.lchown)
    do_truncate = staticmethod(os.truncate)
    do_readlink = staticmethod(os.readlink)

    def do_link(self, old: str, new: str) -> None:
        os.link(old, new, follow_symlinks=False)

    def do_mknod(self, path: str, kind: int, mode: int, major: int = 0, minor: int = 0) -> None:
        os.mknod(path, kind | mode, os.makedev(major, minor))

    def do_bind(self, path: str) -> None:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path)

    def do_renameat2(self, old: str, new: str, flags: int) -> None:
        self._check(_libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags))

    def do_utimens(self, path: str, atime: str, mtime: str) -> None:
        self._utimens(_AT_FDCWD, path, atime, mtime, 0)

    def do_lutimens(self, path: str, atime: str, mtime: str) -> None:
        self._utimens(_AT_FDCWD, path, atime, mtime, _AT_SYMLINK_NOFOLLOW)

    def do_stat(self, path: str) -> tuple[Any, ...]:
        return self._attributes(os.stat(path))

    def do_lstat(self, path: str) -> tuple[Any, ...]:
        return self._attributes(os.lstat(path))

    def do_access(self, path: str, wanted: int) -> bool:
        return os.access(path, wanted, effective_ids=True)

    def do_list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def do_read(self, path: str) -> bytes:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # lest a fifo stops us
        try:
            return os.read(handle, 1 << 20)
        finally:
            os.close(handle)

    def do_write(self, path: str, data: str) -> None:
        self._put(path, os.O_WRONLY | os.O_NONBLOCK, data)

    def do_append(self, path: str, data: str) -> None:
        self._put(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK, data)

    @staticmethod
    def _put(path: str, flags: int, data: str) -> None:
        handle = os.open(path, flags)
        try:
            os.write(handle, data.encode())
        finally:
            os.close(handle)

    def do_setxattr(self, path: str, name: str, value: str) -> None:
        os.setxattr(path, name, value.encode())

    def do_getxattr(self, path: str, name: str) -> bytes:
        return os.getxattr(path, name)

    def do_execute(self, path: str) -> int:
        """The exit status of the program, or why it can't be run."""
        child = os.posix_spawn(path, [path], {})
        return os.waitpid(child, 0)[1]

    def do_umask(self, mask: int) -> None:
        os.umask(mask)

    def do_fault(self, operation: str) -> None:
        """The call with an address where nothing is."""
        call = getattr(_libc, operation)
        nowhere, name = ctypes.c_void_p(-1), b"f"
        after = {"link": (name,), "rename": (name,), "symlink": (name,)}.get(operation, (0, 0, 0))
        self._check(call(nowhere, *after))

    # Relative to a directory

    def _at(self, directory: str, action: Callable[[int], Any]) -> Any:
        handle = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            return action(handle)
        finally:
            os.close(handle)

    def do_openat(self, directory: str, name: str, flags: int, how: int = 0, mode: int = 0o777) -> None:
        handle = os.open(directory, how | os.O_DIRECTORY)
        try:
            os.close(os.open(name, flags, mode, dir_fd=handle))
        finally:
            os.close(handle)

    def do_mkdirat(self, directory: str, name: str, mode: int) -> None:
        self._at(directory, lambda at: os.mkdir(name, mode, dir_fd=at))

    def do_mkfifoat(self, directory: str, name: str, mode: int) -> None:
        self._at(directory, lambda at: os.mkfifo(name, mode, dir_fd=at))

    def do_mknodat(self, directory: str, name: str, kind: int, mode: int) -> None:
        self._at(directory, lambda at: os.mknod(name, kind | mode, os.makedev(1, 2), dir_fd=at))

    def do_symlinkat(self, target: str, directory: str, name: str) -> None:
        self._at(directory, lambda at: os.symlink(target, name, dir_fd=at))

    def do_unlinkat(self, directory: str, name: str) -> None:
        self._at(directory, lambda at: os.unlink(name, dir_fd=at))

    def do_rmdirat(self, directory: str, name: str) -> None:
        self._at(directory, lambda at: os.rmdir(name, dir_fd=at))

    def do_linkat(self, old: str, old_name: str, new: str, new_name: str) -> None:
        self._at(
            old,
            lambda source: self._at(
                new,
                lambda target: os.link(old_name, new_name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False),
            ),
        )

    def do_renameat(self, old: str, old_name: str, new: str, new_name: str) -> None:
        self._at(
            old,
            lambda source: self._at(
                new, lambda target: os.rename(old_name, new_name, src_dir_fd=source, dst_dir_fd=target)
            ),
        )

    def do_fchmodat(self, directory: str, name: str, mode: int) -> None:
        self._at(directory, lambda at: os.chmod(name, mode, dir_fd=at))

    def do_fchownat(self, directory: str, name: str, uid: int, gid: int) -> None:
        self._at(directory, lambda at: os.chown(name, uid, gid, dir_fd=at, follow_symlinks=False))

    def do_fstatat(self, directory: str, name: str) -> Any:
        return self._at(directory, lambda at: self._attributes(os.stat(name, dir_fd=at)))

    def do_readlinkat(self, directory: str, name: str) -> Any:
        return self._at(directory, lambda at: os.readlink(name, dir_fd=at))

    def do_utimensat(self, directory: str, name: str, atime: str, mtime: str) -> None:
        self._at(directory, lambda at: self._utimens(at, name, atime, mtime, _AT_SYMLINK_NOFOLLOW))

    def do_faccessat(self, directory: str, name: str, wanted: int) -> Any:
        return self._at(directory, lambda at: os.access(name, wanted, dir_fd=at, effective_ids=True))

    # Of an open file

    def do_hold(self, handle: str, path: str, flags: int, mode: int = 0o777) -> None:
        self._handles[handle] = os.open(path, flags, mode)

    def do_release(self, handle: str) -> None:
        os.close(self._handles.pop(handle))

    def do_fstat(self, handle: str) -> tuple[Any, ...]:
        status = os.fstat(self._handles[handle])
        return (*self._attributes(status), *self._times(status))

    def do_pread(self, handle: str, size: int, offset: int) -> bytes:
        return os.pread(self._handles[handle], size, offset)

    def do_pwrite(self, handle: str, offset: int, data: str) -> int:
        return os.pwrite(self._handles[handle], data.encode(), offset)

    def do_ftruncate(self, handle: str, size: int) -> None:
        os.ftruncate(self._handles[handle], size)

    def do_fallocate(self, handle: str, offset: int, size: int) -> None:
        os.posix_fallocate(self._handles[handle], offset, size)

    def do_fchmod(self, handle: str, mode: int) -> None:
        os.fchmod(self._handles[handle], mode)

    def do_fchown(self, handle: str, uid: int, gid: int) -> None:
        os.fchown(self._handles[handle], uid, gid)

    def do_futimens(self, handle: str, atime: str, mtime: str) -> None:
        times = self._timespecs(atime, mtime)
        self._check(_libc.futimens(self._handles[handle], times))

    def do_seek(self, handle: str, offset: int, whence: int) -> int:
        return os.lseek(self._handles[handle], offset, whence)

    def do_flink(self, handle: str, path: str) -> None:
        source = os.fsencode(f"/proc/self/fd/{self._handles[handle]}")
        self._check(_libc.linkat(_AT_FDCWD, source, _AT_FDCWD, os.fsencode(path), 0x400))

    def do_flist(self, handle: str) -> list[str]:
        return sorted(os.listdir(self._handles[handle]))

    def do_copy(self, source: str, target: str, size: int) -> int:
        return os.copy_file_range(self._handles[source], self._handles[target], size)

    def do_fsync(self, handle: str) -> None:
        os.fsync(self._handles[handle])

    # Parts

    def _utimens(self, directory: int, path: str, atime: str, mtime: str, flags: int) -> None:
        times = self._timespecs(atime, mtime)
        self._check(_libc.utimensat(directory, os.fsencode(path), times, flags))

    @staticmethod
    def _timespecs(*words: str) -> Any:
        """Two times: seconds.nanoseconds, `now` or `omit`; two times `null` for none at all."""
        if words == ("null", "null"):
            return None
        times = (_Timespec * 2)()
        for i, word in enumerate(words):
            seconds, _, nanoseconds = {"now": f"0.{_UTIME_NOW}", "omit": f"0.{_UTIME_OMIT}"}.get(word, word).partition(
                "."
            )
            times[i] = _Timespec(int(seconds), int(nanoseconds or "0"))
        return times

    @staticmethod
    def _check(result: int) -> None:
        if result:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def _wait_for_the_coarse_clock() -> None:
    """Whatever a file system's clock is, what happens next is later than what happened before."""
    now = time.clock_gettime_ns(time.CLOCK_REALTIME)
    while time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) <= now:
        os.sched_yield()


def run_in(directory: str, number: int, case: Case, *, patient: bool) -> list[Outcome]:
    """Run a case in a new directory of its own."""
    where = os.path.join(directory, f"case{number}")
    os.mkdir(where, 0o755)
    os.chdir(where)
    try:
        return Run(case, patient=patient).outcomes()
    finally:
        os.chdir("/")


def run_table(
    number: int, cases: list[Case], right: str, mount: str, *, patient: bool
) -> list[tuple[list[Outcome], list[Outcome]]]:
    """Run cases on both file systems. Their directory on the mount stays: removing it one by one takes too long."""
    directories = [os.path.join(root, f"table{number}") for root in (right, mount)]
    for directory in directories:
        os.mkdir(directory, 0o755)
    try:
        return [
            (run_in(directories[0], i, case, patient=patient), run_in(directories[1], i, case, patient=patient))
            for i, case in enumerate(cases)
        ]
    finally:
        shutil.rmtree(directories[0])


def main(answers: BinaryIO, right: str, mount: str) -> None:
    """Serve until standard input ends."""
    os.umask(0)
    number = 0
    while True:
        try:
            cases, patient = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        number += 1
        pickle.dump(run_table(number, cases, right, mount, patient=patient), answers)
        answers.flush()


if __name__ == "__main__":
    main(sys.stdout.buffer, *sys.argv[1:])
