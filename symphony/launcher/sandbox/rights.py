"""Dropping of rights in a sandbox: capabilities, files (by Landlock) and system calls (by a filter)."""

from __future__ import annotations

import os
from collections.abc import Iterable

from symphony.launcher.sandbox.kernel import done, lib
from symphony.launcher.sandbox.lacks import step

_STANDARD = 3
"""Number of standard streams: input, output and error."""


def give_up(writable: Iterable[str], kv: str | None, *, network: bool) -> None:
    """Drop rights of this process, which is in the sandbox.

    `writable`: paths below which the program may change files. `kv`: another path below which the program may change
    files, but not create sockets. By such sockets, programs could connect to each other, and share their grants.
    """
    with step("its capabilities can't be dropped"):
        done(lib.sym_drop_capabilities(0))
        done(lib.sym_no_new_privileges())
    with step("this kernel has no Landlock", "boot one of Linux 5.13 or later with landlock in its list of lsm="):
        version = done(lib.sym_landlock_version())
    with step("Landlock refuses its rules"):
        ruleset = done(lib.sym_landlock_new(version, network))
        _allow(ruleset, version, "/", may_write=False)
        for path in writable:
            _allow(ruleset, version, path, may_write=True)
        for fd in filter(os.isatty, range(_STANDARD)):  # /dev/stderr may be a terminal that is not shown
            done(lib.sym_landlock_allow(ruleset, version, fd, True, False))
        if kv is not None:
            _allow(ruleset, version, kv, may_write=True, sockets=False)
        done(lib.sym_landlock_enforce(ruleset))
        os.close(ruleset)
    with step("this kernel filters no system calls", "boot one with CONFIG_SECCOMP_FILTER"):
        done(lib.sym_filter_calls(network))


def _allow(ruleset: int, version: int, path: str, *, may_write: bool, sockets: bool = True) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    done(lib.sym_landlock_allow(ruleset, version, fd, may_write, sockets), path)
    os.close(fd)
