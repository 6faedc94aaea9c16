"""A child of the zygote, from its fork until it becomes the program.

The child writes READY to its report pipe when only exec(2) can still fail. Failures are reported there as JSON:
{"error": text, "status": 126 or 127}. If the pipe is closed without a report, the process ended early.
"""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import locale
import os
import resource
import signal
import site
import sys
import termios
import time
import types
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from symphony.launcher.common import walls
from symphony.launcher.common.confinement import packages_of
from symphony.launcher.common.places import MAX_ERROR, Refused
from symphony.launcher.common.statuses import FAILED, NOT_FOUND, NOT_READABLE, OUT_OF_MEMORY
from symphony.launcher.machine import system
from symphony.launcher.sandbox.enter import Outside, enter
from symphony.launcher.sandbox.lacks import Lacks
from symphony.launcher.zygote.leaving import leave

_REPORT = 3
_HIGHEST = (1 << 31) - 1
_AS_IT_IS = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"})
"""PYTHON variables that a forked child can still apply. An interpreter reads all others only when it starts."""


@dataclass(frozen=True, slots=True)
class Order:
    """A child's descriptors, and the facts about the zygote that the child needs."""

    zygote: int
    base_path: list[str]
    outside: Outside
    spec: int
    report: int
    stdin: int
    stdout: int
    stderr: int
    door: int = -1
    """Socket to which its sandbox's listeners are sent. -1: the program has no grants."""


def become(order: Order) -> None:
    """Turn this process into the program.
    The call usually ends the process. But after a Python program that only the interpreter can end, the call returns.
    """
    with os.fdopen(order.spec, "rb") as file:
        file.seek(0)
        spec: dict[str, Any] = json.load(file)
    outside = _take_descriptors(order)
    _take_walls(spec)
    try:
        if spec["isolation"] == "none":
            system.die_with_parent(order.zygote)
            system.adopt_orphans()
        else:
            enter(spec, outside)
        _take_surroundings(spec)
        if spec["ships"] and not Path(spec["path"]).exists():
            spec.update(path=spec["ships"], python=True)
        file_of_program = _open_program(spec)
    except Lacks as error:
        _refuse(str(error), FAILED)
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        _refuse(f"{error.filename or spec['path']}: {error.strerror}", NOT_FOUND if missing else NOT_READABLE)
    _forget_signals()
    if not spec["python"]:
        os.close(file_of_program)
        _execute(spec, [spec["path"], *spec["args"]])
    elif _needs_an_interpreter_of_its_own(spec["env"]):
        os.close(file_of_program)
        python = sys.executable if spec["venv"] is None else f"{spec['venv']}/bin/python"
        _execute(spec, [python, "-u", spec["path"], *spec["args"]], python)
    else:
        _run_python(spec, order.base_path, file_of_program)


def _take_descriptors(order: Order) -> Outside:
    """Move the standard streams and the report to descriptors 0 to 3, and a sandbox's pipe and door to the next two.
    All other descriptors are closed.
    """
    given = [order.stdin, order.stdout, order.stderr, order.report]
    sandbox = [fd for fd in (order.outside.orders, order.door) if fd >= 0]
    given += sandbox
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, len(given)) for fd in given]):
        os.dup2(fd, number, inheritable=number < _REPORT)
    os.closerange(len(given), _HIGHEST)
    orders, door, *_ = [*range(_REPORT + 1, len(given)), -1, -1]
    return dataclasses.replace(order.outside, orders=orders, door=door)


def _take_walls(spec: dict[str, Any]) -> None:
    """Enter the cgroups and set the OOM score, before the process does anything that these must limit."""
    try:
        walls.enter(spec["cgroups"])
        if spec["oom_score_adj"] is not None:
            walls.go_first(spec["oom_score_adj"])
    except OSError as error:
        _refuse(f"the program can't be limited: {error.filename}: {error.strerror}", FAILED)


def _take_surroundings(spec: dict[str, Any]) -> None:
    os.setsid()
    if spec["tty"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for name, (soft, hard) in spec["rlimits"].items():
        _limit(getattr(resource, name), soft, hard)
    os.umask(spec["umask"])
    os.chdir(spec["cwd"])
    os.environ.update(spec["env"])


def _limit(which: int, soft: int, hard: int) -> None:
    """Set a resource limit to the user's limit, capped at this process's own hard limit."""
    _, most = resource.getrlimit(which)
    if most != resource.RLIM_INFINITY:
        hard = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(which, (soft, hard))


def _open_program(spec: dict[str, Any]) -> int:
    """Open the program's file, and return the descriptor. The interpreter reads a Python program from this descriptor.
    For other programs, the descriptor is not used. After this check, only exec(2) can refuse the program.
    """
    path = Path(spec["path"])
    if path.is_dir():
        raise IsADirectoryError(21, "is a directory", spec["path"])
    if not spec["python"]:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _refuse(text: str, status: int) -> NoReturn:
    os.write(_REPORT, json.dumps({"error": text[:MAX_ERROR], "status": status}).encode())
    os._exit(status)


def _forget_signals() -> None:
    """Reset signal handlers and the mask to the state of a process that a shell starts.
    After an exec, an interpreter again ignores the signals that Python always ignores.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _execute(spec: dict[str, Any], command: list[str], executable: str | None = None) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    path = executable or (spec["path"] if "/" in spec["path"] else f"./{spec['path']}")
    os.write(_REPORT, system.READY)
    try:
        os.execve(path, command, spec["env"])  # noqa: S606 - no shell is wanted
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        _refuse(f"{spec['path']}: {error.strerror}", NOT_FOUND if missing else NOT_READABLE)


def _needs_an_interpreter_of_its_own(env: dict[str, str]) -> bool:
    """Return whether the environment has settings that only a new interpreter can apply.
    These are PYTHON variables that are not in `_AS_IT_IS`, and a locale without UTF-8.
    """
    if any(name.startswith("PYTHON") and name not in _AS_IT_IS for name in env):
        return True
    spoken = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or "C"
    return spoken not in ("C", "POSIX") and spoken.lower().replace("-", "").rpartition(".")[2] != "utf8"


def _run_python(spec: dict[str, Any], base_path: list[str], file: int) -> None:
    path: str = spec["path"]
    env: dict[str, str] = spec["env"]
    sys.argv = [path, *spec["args"]]
    sys.orig_argv = [sys.executable, "-u", *sys.argv]
    own = env.get("PYTHONPATH", "")
    added = [os.path.abspath(entry) for entry in own.split(os.pathsep)] if own else []  # noqa: PTH100
    sys.path[:] = [os.path.dirname(os.path.realpath(path)), *added, *base_path]  # noqa: PTH120 - as Python does
    packages = None if spec["venv"] is None else _packages_of(spec["venv"])
    os.write(_REPORT, system.READY)
    os.close(_REPORT)  # .pth files of the virtual environment may run code from here on
    if packages is not None:
        _use_packages(spec["venv"], packages, 1 + len(added))
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = env.get("PYTHONPYCACHEPREFIX") or None
    with suppress(locale.Error):  # the locale stays C then, as in a new interpreter
        locale.setlocale(locale.LC_CTYPE, "")
    time.tzset()
    _open_standard_streams()
    inherited = frozenset(sys.modules) - {"__main__"}
    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"]).update(__annotations__={}, __builtins__=sys.modules["builtins"])
    if system.run_as_main(file, os.path.join(os.getcwd(), path)):  # noqa: PTH109, PTH118 - as Python does
        leave(0, inherited)
        return
    failed = sys.last_type
    assert failed is not None
    if issubclass(failed, KeyboardInterrupt):  # the interpreter will end the process by SIGINT
        return
    status = OUT_OF_MEMORY if issubclass(failed, MemoryError) and spec["memory"] is not None else 1
    leave(status, inherited)
    sys.exit(status)


def _packages_of(venv: str) -> str:
    try:
        return str(packages_of(venv))
    except Refused as error:  # the client has checked the directory, which has changed since
        _refuse(str(error), FAILED)


def _use_packages(venv: str, packages: str, place: int) -> None:
    """Put a virtual environment's packages before Symphony's in sys.path, and process its .pth files."""
    before = list(sys.path)
    site.addsitedir(packages)
    new = [entry for entry in sys.path if entry not in before]
    sys.path[:] = [*before[:place], *new, *before[place:]]
    sys.prefix = sys.exec_prefix = venv


def _open_standard_streams() -> None:
    """Open the standard streams as `python -u` does: unbuffered, even if they are pipes."""
    kept = sys.stdin.encoding, sys.stdin.errors
    raw = io.FileIO(0, "r", closefd=False)
    sys.stdin = sys.__stdin__ = _text(io.BufferedReader(raw), raw, "<stdin>", *kept)  # type: ignore[misc]
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(number, "w", closefd=False)
        new = _text(raw, raw, f"<{name}>", old.encoding, old.errors)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _text(buffer: Any, raw: io.FileIO, name: str, encoding: str, errors: str | None) -> io.TextIOWrapper:
    raw.name = name
    writes = raw.writable()
    text = io.TextIOWrapper(buffer, encoding, errors, None, raw.isatty(), writes)
    text.mode = "w" if writes else "r"  # type: ignore[misc]
    return text
