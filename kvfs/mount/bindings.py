"""The table between C and Python: the handler of each request of the kernel, and the way in which it is called.

The first number of a request is the number of an inode or of a handle, and selects the handlers. Numbers from
CONTROL_ROOT up select the handlers of `.symphony`. Lower numbers select the handlers of the files. Only `_Routes` makes
this choice, before a handler is called. The choice depends on two more facts: the name `.symphony` in the root, and the
second file of a request on two files.

Quick handlers never wait; slow ones may. Requests for names and attributes are paced while the model computes. A
request that ends something (a close, an unlock) or moves a file's bytes is never paced. Before each read through the
page cache, the kernel asks for the open file's attributes. So this request counts as a part of a read, and is not paced
either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from kvfs.control.directory import CONTROL_ROOT
from kvfs.mount import shim
from kvfs.mount.control_handlers import ControlHandlers
from kvfs.mount.handlers import FileHandlers
from kvfs.mount.requests import Requests
from kvfs.names.inode import MAX_TIME_NS, MIN_TIME_NS
from kvfs.names.tree import CONTROL_NAME, ROOT_NUMBER

_NS = 1_000_000_000

_PACED_NUMBERS = ("readlink", "opendir", "readdir", "statfs")
"""Requests with quick handlers. All arguments are numbers."""
_QUICK_NUMBERS = ("releasedir",)
_SLOW_NUMBERS = ("read", "flush", "fsync", "fsyncdir", "release", "flock", "fallocate")
_PACED_NAMES = ("lookup", "mknod", "unlink", "rmdir")
"""Requests with quick handlers. The first argument is a directory, the second a name in it."""

_Handlers: TypeAlias = FileHandlers | ControlHandlers


@dataclass(frozen=True, slots=True)
class _Routes:
    """Selects the handlers for a request: the handlers of `.symphony`, or the handlers of the files."""

    files: FileHandlers
    controls: _Handlers
    """Handlers of `.symphony`. On a mount without `.symphony`, these are the files' handlers."""

    def whose(self, number: int, name: bytes = b"") -> _Handlers:
        """Return the handlers for an inode, a handle, or a name in a directory."""
        is_control = number >= CONTROL_ROOT or (name == CONTROL_NAME and number == ROOT_NUMBER)
        return self.controls if is_control else self.files

    def whose_are(self, number: int, other: int, name: bytes = b"", other_name: bytes = b"") -> _Handlers:
        """Return the handlers for a request on two files. Those of `.symphony` are returned if either file is a control
        file.
        """
        handlers = self.whose(number, name)
        return self.whose(other, other_name) if handlers is self.files else handlers

    def forget(self, number: int, num_lookups: int) -> None:
        """Have the handlers of the files forget a node. The handlers of control files remember no nodes."""
        if number < CONTROL_ROOT:
            self.files.forget(number, num_lookups)


def bind(requests: Requests, files: FileHandlers, controls: ControlHandlers | None) -> None:
    """Bind these handlers to the kernel's requests. `controls`: None if the mount has no `.symphony`."""
    routes = _Routes(files, controls or files)
    for name in _PACED_NUMBERS:
        _bind_numbers(name, routes, requests.paced, requests.answer)
    for name in _QUICK_NUMBERS:
        _bind_numbers(name, routes, requests.answer)
    for name in _SLOW_NUMBERS:
        _bind_numbers(name, routes, requests.begin)
    for name in _PACED_NAMES:
        _bind_name(name, routes, requests.paced, requests.answer)
    for name in ("open", "listxattr"):
        _bind_numbers(name, routes, requests.paced, requests.begin)
    _bind_name("create", routes, requests.paced, requests.begin)
    _bind_attributes(requests, routes)
    _bind_others(requests, routes)
    shim.bind_silent("looked_up", files.looked_up)
    shim.bind_silent("forget", routes.forget)
    shim.bind_silent("interrupted", requests.interrupted)


def _bind_numbers(name: str, routes: _Routes, how: Any, *first: Any) -> None:
    whose = routes.whose
    shim.bind(name, lambda request, number, *rest: how(*first, getattr(whose(number), name), request, number, *rest))


def _bind_name(name: str, routes: _Routes, how: Any, *first: Any) -> None:
    whose, text = routes.whose, shim.text

    def callback(request: Any, parent: int, pointer: Any, *rest: int) -> Any:
        child = text(pointer)
        return how(*first, getattr(whose(parent, child), name), request, parent, child, *rest)

    shim.bind(name, callback)


def _bind_attributes(requests: Requests, routes: _Routes) -> None:
    """Bind the handlers of attributes and extended attributes. Each handler has its own kinds of arguments."""
    paced, quick, slow, whose, text = requests.paced, requests.answer, requests.begin, routes.whose, shim.text

    def getattr_(request: Any, number: int, has_file: int) -> int:
        if has_file:
            return quick(whose(number).getattr, request, number)
        return paced(quick, whose(number).getattr, request, number)

    def setattr_(request: Any, number: int, fields: int, has_file: int, fh: int, *values: int) -> int:
        *others, atime_s, atime_ns, mtime_s, mtime_ns = values
        times_ns = (_time_ns(atime_s, atime_ns), _time_ns(mtime_s, mtime_ns))
        handle = fh if has_file else None
        return paced(slow, whose(number).setattr, request, number, fields, handle, *others, *times_ns)

    def getxattr(request: Any, number: int, name: Any, room: int) -> int:
        return paced(slow, whose(number).getxattr, request, number, text(name), room)

    def setxattr(request: Any, number: int, name: Any, value: Any, size: int, flags: int, uid: int) -> int:
        value = bytes(shim.view(value, size))
        return paced(slow, whose(number).setxattr, request, number, text(name), value, flags, uid)

    def removexattr(request: Any, number: int, name: Any, uid: int) -> int:
        return paced(slow, whose(number).removexattr, request, number, text(name), uid)

    shim.bind("getattr", getattr_)
    shim.bind("setattr", setattr_)
    for callback in (getxattr, setxattr, removexattr):
        shim.bind(callback.__name__, callback)


def _time_ns(seconds: int, nanoseconds: int) -> int:
    """Return a time that a program sets, in nanoseconds. A time out of range becomes the nearest time in range, as on
    other file systems.
    """
    return min(max(seconds * _NS + nanoseconds, MIN_TIME_NS), MAX_TIME_NS)


def _bind_others(requests: Requests, routes: _Routes) -> None:
    """Bind the handlers that take two files, or arguments that are not numbers."""
    paced, quick, slow, text = requests.paced, requests.answer, requests.begin, shim.text

    def symlink(request: Any, target: Any, parent: int, name: Any, uid: int, gid: int) -> int:
        return paced(quick, routes.whose(parent).symlink, request, parent, text(name), text(target), uid, gid)

    def link(request: Any, number: int, parent: int, name: Any, uid: int) -> int:
        return paced(quick, routes.whose_are(number, parent).link, request, number, parent, text(name), uid)

    def rename(request: Any, parent: int, name: Any, new_parent: int, new_name: Any, flags: int) -> int:
        name, new_name = text(name), text(new_name)
        handler = routes.whose_are(parent, new_parent, name, new_name).rename
        return paced(quick, handler, request, parent, name, new_parent, new_name, flags)

    def copy_file_range(request: Any, fh: int, offset: int, target_fh: int, *rest: int) -> int:
        return slow(routes.whose_are(fh, target_fh).copy_file_range, request, fh, offset, target_fh, *rest)

    def write(request: Any, fh: int, offset: int, data: Any, size: int) -> int:
        return slow(routes.whose(fh).write, request, fh, offset, shim.view(data, size))

    for callback in (symlink, link, rename, copy_file_range, write):
        shim.bind(callback.__name__, callback)
