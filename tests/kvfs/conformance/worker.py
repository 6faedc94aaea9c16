# ruff: noqa: PTH102, PTH118 - the system calls are what is tested
"""A process that runs scripts on two file systems and tells what happened on each.

Root's real user stays; the effective one is the step's, which is what the kernel goes by (but for access(2)). Requests
are pickled: cases, and whether to be patient with coarse clocks. Answers are lists of `Outcome`, two for each case.
"""

from __future__ import annotations

import itertools
import os
import pickle
import stat
import sys
import time
from typing import Any, BinaryIO

from tests.kvfs.conformance.operations import OPERATIONS
from tests.kvfs.conformance.script import OK, USERS, Case, Outcome, Step, User, name_of

_CLOCK_REALTIME_COARSE = 5
_DAY_NS = 86_400 * 10**9


def become(user: User) -> None:
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
            os.umask(0)
            for handle in self._handles.values():
                os.close(handle)
        return found

    def _result(self, step: Step) -> Any:
        codes, action = OPERATIONS[step.operation]
        coded = zip(codes, step.arguments, strict=False)
        arguments = [self._handles[str(word)] if code == "h" else word for code, word in coded]
        become(step.user)
        try:
            result = action(*arguments)
        except OSError as error:
            return name_of(error.errno)
        finally:
            become(USERS["root"])
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


def main(answers: BinaryIO, *roots: str) -> None:
    """Serve until standard input ends. The directories of the cases stay: removing them one by one takes too long."""
    os.umask(0)
    for number in itertools.count():
        try:
            cases, patient = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        directories = [os.path.join(root, f"table{number}") for root in roots]
        for directory in directories:
            os.mkdir(directory, 0o755)
        pickle.dump(
            [[run_in(d, i, case, patient=patient) for d in directories] for i, case in enumerate(cases)], answers
        )
        answers.flush()


if __name__ == "__main__":
    main(sys.stdout.buffer, *sys.argv[1:])
