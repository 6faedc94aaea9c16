"""Functions that the standard library lacks: prctl(2), fork by a C function, and running a script as Python does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

READY = b"+"
"""Report of a process that it is about to become a program."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_FORKS = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
"""Type of a C function that forks. ctypes holds the interpreter's lock during the call."""


def name_process(name: str) -> None:
    """Set the name of this process that `ps` shows: up to 15 bytes."""
    text = ctypes.create_string_buffer(name.encode())
    _prctl(_PR_SET_NAME, ctypes.addressof(text))


def adopt_orphans() -> None:
    """Make this process a subreaper: descendants whose parents end become its children, even from other sessions."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when `parent` ends. If `parent` has ended, send the signal now."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def forked_by(function: int, number: int, said: int, statuses: int, orders: Any) -> int:
    """Fork like os.fork(), but by the C function at the address `function`. The C function returns -errno if it fails.

    `number`, `said`, `statuses` and `orders` are the arguments of the C function.
    """
    python = ctypes.pythonapi
    fork = _FORKS(function)
    python.PyOS_BeforeFork()
    pid = int(fork(number, said, statuses, orders))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return pid


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def run_as_main(descriptor: int, filename: str) -> bool:
    """Run the Python source in the file `descriptor` as `__main__`, like `python FILE`. Return whether it succeeded.

    The interpreter's own function runs the source. So tracebacks have no frame of Symphony's, SystemExit is handled
    with its text, hooks are called, and an unhandled interrupt ends the process by SIGINT after its cleanup.
    """
    _libc.fdopen.restype = ctypes.c_void_p
    file = _libc.fdopen(descriptor, b"rb")
    if not file:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    run = ctypes.pythonapi.PyRun_SimpleFileExFlags
    run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    sys.stdout.flush()
    return bool(run(file, os.fsencode(filename), 1, None) == 0)
