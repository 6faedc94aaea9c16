"""Which handler answers which request of the kernel, and how: the table between C and Python.

Quick handlers wait for nothing, slow ones may. Those for names and attributes are paced while the model computes;
never what ends something (a close, an unlock) or moves a file's bytes. The kernel asks for an open file's attributes
before each read through the page cache, and for its capabilities before each write: those are parts of a read or write.
"""

from __future__ import annotations

from typing import Any

from kvfs.mount import shim
from kvfs.mount.handlers import KvOperations
from kvfs.mount.requests import Requests

_NS = 1_000_000_000

_PACED_NUMBERS = ("readlink", "opendir", "readdir", "statfs", "listxattr")
"""Quick, and all arguments are numbers."""
_QUICK_NUMBERS = ("fsync", "releasedir", "fsyncdir")
_SLOW_NUMBERS = ("read", "flush", "release", "flock", "copy_file_range", "fallocate")
_PACED_NAMES = ("lookup", "mknod", "unlink", "rmdir", "removexattr")
"""Quick, and the second argument is a name."""

_CAPABILITIES = b"security.capability"


def bind(requests: Requests, operations: KvOperations) -> None:
    """Let the kernel's requests be answered by these handlers."""
    for name in _PACED_NUMBERS:
        _bind_numbers(name, requests.paced, requests.answer, getattr(operations, name))
    for name in _QUICK_NUMBERS:
        _bind_numbers(name, requests.answer, getattr(operations, name))
    for name in _SLOW_NUMBERS:
        _bind_numbers(name, requests.begin, getattr(operations, name))
    for name in _PACED_NAMES:
        _bind_name(name, requests.paced, requests.answer, getattr(operations, name))
    _bind_numbers("open", requests.paced, requests.begin, operations.open)
    _bind_name("create", requests.paced, requests.begin, operations.create)
    _bind_others(requests, operations)
    shim.bind_silent("forget", operations.forget)
    shim.bind_silent("interrupted", requests.interrupted)


def _bind_numbers(name: str, how: Any, *first: Any) -> None:
    shim.bind(name, lambda request, *numbers: how(*first, request, *numbers))


def _bind_name(name: str, how: Any, *first: Any) -> None:
    text = shim.text
    shim.bind(name, lambda request, number, name, *rest: how(*first, request, number, text(name), *rest))


def _bind_others(requests: Requests, operations: KvOperations) -> None:
    """Those whose arguments are of a shape of their own."""
    paced, quick, slow, text = requests.paced, requests.answer, requests.begin, shim.text

    def getattr_(request: Any, number: int, has_file: int) -> int:
        if has_file:
            return quick(operations.getattr, request, number)
        return paced(quick, operations.getattr, request, number)

    def getxattr(request: Any, number: int, name: Any, room: int) -> int:
        name = text(name)
        if name == _CAPABILITIES:
            return quick(operations.getxattr, request, number, name, room)
        return paced(quick, operations.getxattr, request, number, name, room)

    def link(request: Any, number: int, parent: int, name: Any) -> int:
        return paced(quick, operations.link, request, number, parent, text(name))

    def symlink(request: Any, target: Any, parent: int, name: Any, uid: int, gid: int) -> int:
        return paced(quick, operations.symlink, request, parent, text(name), text(target), uid, gid)

    def rename(request: Any, parent: int, name: Any, new_parent: int, new_name: Any, flags: int) -> int:
        return paced(quick, operations.rename, request, parent, text(name), new_parent, text(new_name), flags)

    def setxattr(request: Any, number: int, name: Any, value: Any, size: int, flags: int, uid: int) -> int:
        value = bytes(shim.view(value, size))
        return paced(quick, operations.setxattr, request, number, text(name), value, flags, uid)

    def setattr_(request: Any, number: int, fields: int, has_file: int, fh: int, *values: int) -> int:
        *others, atime_s, atime_ns, mtime_s, mtime_ns = values
        times_ns = (atime_s * _NS + atime_ns, mtime_s * _NS + mtime_ns)
        handle = fh if has_file else None
        return paced(slow, operations.setattr, request, number, fields, handle, *others, *times_ns)

    def write(request: Any, fh: int, offset: int, data: Any, size: int) -> int:
        return slow(operations.write, request, fh, offset, shim.view(data, size))

    for callback in (getxattr, link, symlink, rename, setxattr, write):
        shim.bind(callback.__name__, callback)
    shim.bind("getattr", getattr_)
    shim.bind("setattr", setattr_)
