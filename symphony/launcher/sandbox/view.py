"""What of the machine's files a sandbox shows.

The system's are looked for once, by the zygote. What the user wants to be shown is opened before the sandbox has a root
of its own, by the path that it had without links when the command was given: a program may write to some of it, and
must not choose what its children, or its own next start, get to see.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from symphony.launcher.sandbox.kernel import done, lib
from symphony.launcher.sandbox.lacks import Lacks
from symphony.launcher.spec import SOCKET_INSIDE
from symphony.launcher.surroundings import ROOT

_SYSTEM = ("bin", "lib", "lib32", "lib64", "libx32", "nix", "opt", "sbin", "usr")
_OF_ETC = (
    "alternatives",
    "fonts",
    "group",
    "ld.so.cache",
    "localtime",
    "machine-id",
    "mime.types",
    "os-release",
    "passwd",
    "pki/ca-trust",
    "pki/tls/certs",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "timezone",
)
"""What programs and their libraries look for, and is no secret of the machine's."""
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")


@dataclass(frozen=True, slots=True)
class Shown:
    """One file or directory, with all below it."""

    path: str
    """Where it is inside."""
    source: str
    """Where it is outside, once the machine's tree is at `/old`."""
    is_directory: bool
    writable: bool = False
    has_devices: bool = False
    """Devices are written to where nothing else is: what is read-only is a node's owner and mode, too."""


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link."""

    path: str
    target: str


@functools.cache
def system_view() -> tuple[Shown | Link, ...]:
    """What all sandboxes show: the system, what libraries look for, devices, this Python, libsym."""
    found: list[Shown | Link] = []
    for name in _SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            found.append(Link(path, os.readlink(path)))
        else:
            found += _if_there(path)
    for name in _OF_ETC:
        found += _if_there(f"/etc/{name}")
    for name in _DEVICES:
        found += _if_there(f"/dev/{name}", is_device=True)
    ours = dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix, f"{ROOT}/libsym", f"{ROOT}/lips"))
    for path in ours:
        found += _if_there(path)
    return tuple(found)


def _if_there(path: str, *, is_device: bool = False) -> list[Shown | Link]:
    if not os.path.exists(path):
        return []
    real = os.path.realpath(path)
    shown = Shown(real, f"/old{real}", os.path.isdir(real), has_devices=is_device)
    return [shown, *([Link(path, real)] if path != real else [])]


def open_view(spec: dict[str, Any]) -> Iterator[Shown | Link]:
    """What one program's sandbox shows beyond that. Lacks: what the user wants to be shown is not there."""
    socket = os.open(spec["socket"], os.O_PATH | os.O_CLOEXEC)
    yield Shown(SOCKET_INSIDE, f"/old/proc/self/fd/{socket}", is_directory=False)
    for path, real, writable in spec["shows"]:
        try:
            fd = done(lib.sym_open_path(os.fsencode(real)))
        except OSError as error:
            why = "it is not what it was when the program was started" if error.errno == errno.ELOOP else error.strerror
            raise Lacks(f"{path} can't be shown to the program: {why}") from None
        source = f"/old/proc/self/fd/{fd}"
        yield Shown(real, source, stat.S_ISDIR(os.fstat(fd).st_mode), writable)
        if path != real:
            yield Link(path, real)
