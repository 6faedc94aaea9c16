"""Functions that the standard library lacks: prctl(2), and the C level of Python that runs a script."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

READY = b"+"
"""Report of a process that is about to be a program."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_FORKS = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
"""A function that is called without letting go of the interpreter's lock."""


def name_process(name: str) -> None:
    """Call this process by a name of up to 15 bytes, as `ps` shows it."""
    text = ctypes.create_string_buffer(name.encode())
    _prctl(_PR_SET_NAME, ctypes.addressof(text))


def adopt_orphans() -> None:
    """Processes whose parents end become this process's children, whatever sessions they made."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """The kernel sends `number` to this process when `parent` ends; at once, if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def forked_by(function: int, number: int, said: int, statuses: int, orders: Any) -> int:
    """As os.fork(), by the C function at an address, which gives -errno; the rest is what it is called with."""
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
    """Runs the Python source that `descriptor` reads as `__main__`, as `python FILE` does; whether it ended well.

    It is the interpreter's own function that does. So a traceback has no frame of ours, SystemExit is handled with its
    text, hooks are asked, and an interrupt that nobody handles ends the process by SIGINT when it has cleaned up.
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
