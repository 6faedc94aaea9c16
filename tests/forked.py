"""Processes of Python that begin without imports: forks of a process that has imported what they use.

An import of the daemon takes half a second, of the command line a fifth, and tests start more than a thousand of these.
`Forked` is a Popen whose process is forked if its words are in `MODULES`. A process that has more than words, an
environment, streams and descriptors begins anew: another user's, one of another PYTHONPATH, one on a terminal.
"""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    ("-m", "symphony", "serve"): "symphony.daemon.daemon",
    ("-m", "symphony"): "symphony.cli",
    ("-m", "lips.gateway"): "lips.gateway.server",
    ("-c",): "libsym",
}
"""Modules that are imported once for all processes whose words behind `python` begin so."""
ENVIRONMENT = dict(os.environ)
AT_START = ("PYTHON", "OMP_", "LC_", "LANG")
"""Begins of the names of variables that Python or a library reads once."""
PR_SET_CHILD_SUBREAPER = 36
MAX_MESSAGE_BYTES, MAX_DESCRIPTORS = 200_000, 100


class Forked(subprocess.Popen[Any]):
    """A child of this process, forked if it can be."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        executable, preexec_fn, _close_fds, pass_fds, cwd, env, _info, _flags, shell, *rest = given
        *pipes, _restore_signals, gid, gids, uid, umask, new_session, group = rest
        words = [] if shell else [*map(os.fsdecode, args)]
        environment = dict(os.environ if env is None else env)
        streams = [own if fd < 0 else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        is_plain = (executable, preexec_fn, gid, gids, uid) == (None,) * 5 and (umask, group) == (-1, -1)
        modules = [module for begin, module in MODULES.items() if words[: 1 + len(begin)] == [sys.executable, *begin]]
        is_same = _read_at_start(environment) == _read_at_start(ENVIRONMENT) and not any(map(os.isatty, streams))
        is_test = "tests.conftest" in sys.modules  # scripts find their processes by command lines, which forks share
        if not (is_test and modules and is_plain and is_same) or new_session:
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        told = {"words": words[1:], "environment": environment, "cwd": os.fspath(cwd or "."), "fds": [*pass_fds]}
        self.pid = forker(modules[0]).fork(told, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(command: Any, *, timeout: float, **how: Any) -> subprocess.CompletedProcess[Any]:
    """As subprocess.run, with the output captured."""
    given = how.pop("input", None)
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | (
        {} if given is None else {"stdin": subprocess.PIPE}
    )
    with Forked(command, **how) as process:
        try:
            out, err = process.communicate(given, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _read_at_start(environment: Any) -> set[tuple[str, str]]:
    """Return variables that make a difference, which this checkout in PYTHONPATH does not: it is found in any case."""
    found = {(name, value) for name, value in environment.items() if name.startswith(AT_START)}
    return found - {("PYTHONPATH", str(ROOT))}


class Forker:
    """A process without threads that has imported a module, and forks others. It ends with this one."""

    def __init__(self, module: str) -> None:
        self._lock, self._prctl = threading.Lock(), ctypes.CDLL(None).prctl
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = "from tests.forked import serve; run = serve(); run()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT,
                cwd=ROOT,
            )

    def fork(self, told: dict[str, Any], fds: list[int]) -> int:
        """Return the pid of a new child of this process, which adopts it."""
        with self._lock:
            self._prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(told).encode()], fds)
                return int(self._socket.recv(100))
            finally:
                self._prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


forker = cache(Forker)


def serve() -> Callable[[], object]:
    """Fork for the process at the other end of the socket. Return in each fork, with what it runs."""
    importlib.import_module(sys.argv[1])
    gc.collect()
    gc.freeze()
    asking = socket.socket(fileno=int(sys.argv[2]))
    while True:
        message, fds, _, _ = socket.recv_fds(asking, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            sys.exit()
        reads, writes = os.pipe()
        between = os.fork()
        if not between:
            parent = os.getpid()
            pid = os.fork()
            if not pid:
                asking.detach()
                while os.getppid() == parent:  # which ends now
                    time.sleep(0.0001)
                return _begun(json.loads(message), fds)
            os.write(writes, b"%d" % pid)
            os._exit(0)
        os.waitpid(between, 0)  # now the fork has its new parent
        asking.send(os.read(reads, 100))
        for fd in (*fds, reads, writes):
            os.close(fd)


def _begun(told: dict[str, Any], fds: list[int]) -> Callable[[], object]:
    """Become a new process with these streams, descriptors, variables and words."""
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["environment"])
    numbers = [0, 1, 2, *told["fds"]]
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(*numbers, *fds) + 1) for fd in fds]
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
    for after, before in zip([*sorted(numbers)], [*sorted(numbers)[1:], 1 << 20], strict=True):
        os.closerange(after + 1, before)
    kind, name, *words = told["words"]
    sys.argv = [kind, *words]
    if kind == "-m":
        return partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    module = sys.modules["__main__"] = ModuleType("__main__")
    return partial(exec, compile(name, "<string>", "exec"), module.__dict__)
