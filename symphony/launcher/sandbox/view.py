"""View: the machine's files that a sandbox shows.

The zygote looks up the system's files once. The client resolves the links in the user's paths when the user gives the
command. These real paths are opened before the sandbox's root is built. A program may write to some of these
directories. A link that the program puts there must not change which files its children or its next start can see.
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

from symphony.launcher.common.spec import SOCKET_INSIDE
from symphony.launcher.common.surroundings import ROOT
from symphony.launcher.sandbox.kernel import done, lib
from symphony.launcher.sandbox.lacks import Lacks

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
"""Files of /etc that programs and their libraries need. None of them holds a secret of the machine."""
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")


@dataclass(frozen=True, slots=True)
class Shown:
    """File or directory that the sandbox shows, with everything below it."""

    path: str
    """Path inside the sandbox."""
    source: str
    """Path of the original when the machine's tree is at `/old`."""
    is_directory: bool
    writable: bool = False
    has_devices: bool = False
    """Whether device nodes work on the mount.
    A read-only mount protects their owner and mode, but not their contents.
    """


@dataclass(frozen=True, slots=True)
class ShownLink:
    """Symbolic link in the sandbox."""

    path: str
    target: str


@functools.cache
def system_view() -> tuple[Shown | ShownLink, ...]:
    """Return the files that all sandboxes show: the system, files that libraries need, devices, this Python, libsym."""
    found: list[Shown | ShownLink] = []
    for name in _SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            found.append(ShownLink(path, os.readlink(path)))
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


def _if_there(path: str, *, is_device: bool = False) -> list[Shown | ShownLink]:
    if not os.path.exists(path):
        return []
    real = os.path.realpath(path)
    shown = Shown(real, f"/old{real}", os.path.isdir(real), has_devices=is_device)
    return [shown, *([ShownLink(path, real)] if path != real else [])]


def open_view(spec: dict[str, Any]) -> Iterator[Shown | ShownLink]:
    """Yield the files that one sandbox shows beside `system_view`. Lacks: a path of the user was removed or changed."""
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
            yield ShownLink(path, real)
