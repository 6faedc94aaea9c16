"""Processes of Python that begin without imports: forks of a process that has imported what they use.

An import of the daemon takes half a second, of the command line a fifth, and tests start more than a thousand of these.
`Forked` is a Popen whose process is forked if its words are in `MODULES`, or a script's. All processes that a forked
script starts are such Popens. A process that has more than words, an environment, streams and descriptors begins anew:
another user's, one of another PYTHONPATH, one on a terminal, one whose parent has changed what its children inherit.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import BufferedRandom, BufferedWriter, TextIOWrapper
from pathlib import Path
from runpy import run_module
from types import ModuleType
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable  # which a test may replace
SCRIPT = "symphony.daemon.daemon lips.gateway.server"
MODULES = {
    ("-m", "symphony", "serve"): "symphony.daemon.daemon",
    ("-m", "symphony"): "symphony.cli",
    ("-m", "symphony.cli"): "symphony.daemon.daemon",
    ("-m", "lips.gateway"): "lips.gateway.server",
    ("-m", "tests.kvfs.mount_server"): "tests.kvfs.mount_server",
    ("-c",): "libsym",
}
"""Modules that are imported once for all processes whose words behind `python` begin so."""
AT_START = ("PYTHON", "OMP_", "LC_", "LANG")
"""Begins of the names of variables that Python or a library reads once."""
INHERITED = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed")
"""Lines of /proc/self/status that a child has from its parent."""
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "user", "uts")
PR_SET_MM, PR_SET_MM_MAP, PR_SET_CHILD_SUBREAPER = 35, 14, 36
MAX_MESSAGE_BYTES, MAX_DESCRIPTORS = 200_000, 100


class Forked(subprocess.Popen[Any]):
    """A child of this process, forked if it can be."""

    forkers: ClassVar["Callable[[str], Forker] | None"] = None
    """Forkers by their modules. None: neither a process of tests nor a script that tests have forked."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        executable, preexec_fn, _close_fds, pass_fds, cwd, env, _info, _flags, shell, *rest = given
        *pipes, _restore_signals, gid, gids, uid, umask, new_session, group = rest
        words = [] if shell else [*map(os.fsdecode, args)]
        environment = dict(os.environ if env is None else env)
        streams = [own if fd < 0 else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        is_plain = (executable, preexec_fn, gid, gids, uid) == (None,) * 5 and (umask, group) == (-1, -1)
        modules = _imported_by(words)
        is_forked = Forked.forkers and modules and is_plain and not new_session and not any(map(os.isatty, streams))
        forker = Forked.forkers(modules) if is_forked and Forked.forkers else None
        if forker is None or not forker.is_alike(environment):
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        told = {"words": words, "environment": environment, "cwd": os.fspath(cwd or "."), "fds": [*pass_fds]}
        self.pid = forker.fork(told, [*streams, *pass_fds])
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


def _imported_by(words: list[str]) -> str:
    """Return the modules that a process with these words imports, or an empty string."""
    if words[:1] != [PYTHON]:
        return ""
    found = [module for begin, module in MODULES.items() if words[1 : 1 + len(begin)] == [*begin]]
    return found[0] if found else SCRIPT if words[1:2] and words[1].endswith(".py") else ""


def _read_at_start(environment: Any) -> set[tuple[str, str]]:
    """Return variables that make a difference, which this checkout in PYTHONPATH does not: it is found in any case."""
    found = {(name, value) for name, value in environment.items() if name.startswith(AT_START)}
    return found - {("PYTHONPATH", str(ROOT))}


def _inherited() -> list[Any]:
    """Return what a child has from this process, and a fork of another process has not."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    files = [Path("/proc/self", name).read_text() for name in ("limits", "cgroup")]
    spaces = [Path("/proc/self/ns", name).stat().st_ino for name in NAMESPACES]
    return [
        *(line for line in lines if line.startswith(INHERITED)),
        *files,
        *spaces,
        os.getpriority(os.PRIO_PROCESS, 0),
    ]


class Forker:
    """The end of a process without threads that has imported modules, and forks others. It ends with this process."""

    def __init__(self, end: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._lock, self._prctl = threading.Lock(), ctypes.CDLL(None).prctl
        self._socket, self._process, self._owner = end, process, os.getpid()
        self._read_at_start, self._inherited = _read_at_start(os.environ), _inherited()

    @classmethod
    def importing(cls, modules: str) -> "Forker":
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = "from tests.forked import End, serve; end = End(); end.of(serve())"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", program, modules, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )
        return cls(own, process)

    def is_alike(self, environment: dict[str, str]) -> bool:
        """Return whether a fork has what a child of this process with this environment has."""
        alike = _read_at_start(environment) == self._read_at_start and _inherited() == self._inherited
        return alike and os.getpid() == self._owner

    def fork(self, told: dict[str, Any], fds: list[int]) -> int:
        """Return the pid of a new child of this process, which adopts it."""
        with self._lock:
            self._prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(told).encode()], fds)
                return int(self._socket.recv(100))
            finally:
                self._prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class End:
    """The end of a fork, which frees no modules: those are the server's, and each freed page of them would be copied.

    What Python does before stays: it tells errors, waits for threads, and runs the handlers of `atexit`, of which this
    one is the first to be registered and the last to run. Files that are open get what is in their buffers.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        atexit.register(self._leave)

    def of(self, run: Callable[[], object]) -> None:
        try:
            run()
        except KeyboardInterrupt:  # the status is a signal
            raise
        except SystemExit as error:
            self._status = error.code or 0 if isinstance(error.code, int | None) else 1
            raise
        except BaseException:
            self._status = 1
            raise
        self._status = 0

    def _leave(self) -> None:
        if self._status is None:
            return
        with suppress(OSError, ValueError):  # Python tries again, and tells it
            for each in (sys.stdout, sys.stderr, *gc.get_objects()):
                if type(each) in (TextIOWrapper, BufferedWriter, BufferedRandom) and not each.closed:
                    each.flush()
            os._exit(self._status & 0xFF)


def serve() -> Callable[[], object]:
    """Fork for the process at the other end of the socket. Return in each fork, with what it runs."""
    for module in sys.argv[1].split():
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    asking = socket.socket(fileno=int(sys.argv[2]))
    while True:
        message, fds, _, _ = socket.recv_fds(asking, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        told = json.loads(message)
        reads, writes = os.pipe()
        between = os.fork()
        if not between:
            parent = os.getpid()
            pid = os.fork()
            if pid:
                os.write(writes, b"%d" % pid)
                os._exit(0)
            while os.getppid() == parent:  # which ends now
                time.sleep(0.0001)
            asking.detach()
            if told["words"][1].startswith("-"):
                return _begun(told, fds)
            own, asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork():
                return _begun(told, fds, own)
            own.close()  # and fork for this script, as nothing has happened yet here
        else:
            os.waitpid(between, 0)  # now the fork has its new parent
            asking.send(os.read(reads, 100))
        for fd in (*fds, reads, writes):
            os.close(fd)


def _begun(told: dict[str, Any], fds: list[int], forks: socket.socket | None = None) -> Callable[[], object]:
    """Become a new process with these streams, descriptors, variables and words. `forks`: the server of a script's."""
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["environment"])
    _show(told["words"], told["environment"])
    tempfile.tempdir = None
    numbers = [0, 1, 2, *told["fds"]]
    if forks is not None:
        fds, numbers = [*fds, forks.detach()], [*numbers, max(numbers) + 1]
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(*numbers, *fds) + 1) for fd in fds]
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
    for after, before in zip([*sorted(numbers)], [*sorted(numbers)[1:], 1 << 20], strict=True):
        os.closerange(after + 1, before)
    if forks is not None:
        os.set_inheritable(numbers[-1], False)
        return _script(told["words"][1:], Forker(socket.socket(fileno=numbers[-1])))
    kind, name, *words = told["words"][1:]
    sys.argv = [kind, *words]
    if kind == "-m":
        sys.modules.pop(name, None)
        return partial(run_module, name, run_name="__main__", alter_sys=True)
    return _main(name, "<string>")


def _script(words: list[str], forker: Forker) -> Callable[[], object]:
    """Become a script whose processes are forked, too."""
    Forked.forkers, subprocess.Popen = lambda _modules: forker, Forked  # type: ignore[misc]
    sys.argv, path = words, Path(words[0])
    sys.path[0] = str(path.resolve().parent)
    return _main(path.read_text(), str(path))


def _main(source: str, name: str) -> Callable[[], object]:
    module = sys.modules["__main__"] = ModuleType("__main__")
    if name != "<string>":
        module.__file__ = name
    return partial(exec, compile(source, name, "exec"), module.__dict__)


def _show(words: list[str], environment: dict[str, str]) -> None:
    """Show words and variables in /proc, where scripts and people look for processes."""
    parts = words, [f"{name}={value}" for name, value in environment.items()]
    texts = [b"".join(os.fsencode(each) + b"\0" for each in part) for part in parts]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    begin = libc.malloc(len(texts[0]) + len(texts[1]))  # and never freed
    middle, end = begin + len(texts[0]), begin + len(texts[0]) + len(texts[1])
    ctypes.memmove(begin, b"".join(texts), end - begin)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third on, as proc(5) counts
    code, stack, data, heap = (fields[first - 3 : last - 2] for first, last in ((26, 27), (28, 28), (45, 46), (47, 47)))
    addresses = (*map(int, (*code, *data, *heap)), libc.sbrk(0), int(*stack), begin, middle, middle, end)
    told = struct.pack("11QQIi", *addresses, 0, 0, -1)  # struct prctl_mm_map
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, told, len(told), 0):
        raise OSError(ctypes.get_errno(), "the kernel does not take the words of a forked process")
