"""Errors that Symphony raises on purpose: one small tree of classes, each with its errno.

`SymError` is an `OSError`, so a program that treats Symphony's files like files needs no new exceptions.
`error.errno` is the errno that a C program would see. The message is one line: it names the thing, the value and
what to do.
"""
# ruff: noqa: N818  # `except sym.NotFound` reads well, and every class is a SymError

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any


class SymError(OSError):
    """A failed system call. `errno` has the kind of error. The message has the reason and the remedy."""

    code = errno.EIO

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(self.code if code is None else code, one_line(message))

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[type[SymError], tuple[str, int | None]]:
        return type(self), (str(self), self.errno)


class NotFound(SymError):
    """No file has this name: look at the spelling, or create it first."""

    code = errno.ENOENT


class Exists(SymError):
    """The name is taken: remove it first, or choose another."""

    code = errno.EEXIST


class NoAccess(SymError):
    """The mode bits of the file, or of a directory on the way, forbid the operation to the caller."""

    code = errno.EACCES


class NotPermitted(SymError):
    """Only the owner or root may perform this operation."""

    code = errno.EPERM


class BadHandle(SymError):
    """The handle is not open on this connection."""

    code = errno.EBADF


class Invalid(SymError):
    """An argument is out of range, or an image does not fit this model."""

    code = errno.EINVAL


class NoSpace(SymError):
    """The page pool is full: remove files or forks, or start the daemon with more KV memory."""

    code = errno.ENOSPC


class OverQuota(SymError):
    """The owner has used up its quota of pages or files, or the caller has used up its quota of daemon memory."""

    code = errno.EDQUOT


class TooLarge(SymError):
    """The message or its result does not fit the connection's shared region."""

    code = errno.EMSGSIZE


class NoBuffers(SymError):
    """Every result slot is held by a live `Dist`: drop some of them before you ask for more rows."""

    code = errno.ENOBUFS


class NotSupported(SymError):
    """The operation has no meaning for files of this kind."""

    code = errno.EOPNOTSUPP


class NotDirectory(SymError):
    """A component of the path is a file where a directory was needed."""

    code = errno.ENOTDIR


class IsDirectory(SymError):
    """The path names a directory where a file was needed."""

    code = errno.EISDIR


class NotEmpty(SymError):
    """The directory still holds names."""

    code = errno.ENOTEMPTY


class NameTooLong(SymError):
    """A name is longer than 255 bytes, or a path longer than 4095."""

    code = errno.ENAMETOOLONG


class TooManyLinks(SymError):
    """Too many symbolic links on the way (a loop?)."""

    code = errno.ELOOP


class CrossDevice(SymError):
    """The path leaves the mount."""

    code = errno.EXDEV


class Busy(SymError):
    """Another call is using the file in a way that excludes this call."""

    code = errno.EBUSY


class WouldBlock(SymError):
    """The call cannot succeed without waiting: a lock is held, a queue or table is full, or no message has come."""

    code = errno.EWOULDBLOCK


class TimedOut(SymError):
    """The deadline of a `pred` has passed, and nothing was appended; or the disk, or a program, does not answer."""

    code = errno.ETIMEDOUT


class NotConnected(SymError):
    """The daemon is not there, or went away: start it with `symphony serve`, then connect again."""

    code = errno.ENOTCONN


class ProtocolError(SymError):
    """The two sides of a channel speak different versions, or a frame was malformed."""

    code = errno.EPROTO


class StepFailed(SymError):
    """The decoder failed while it ran this call; nothing was appended."""

    code = errno.EIO


class BatchFailed(SymError):
    """Calls of a `pred_batch` failed. `errno` belongs to the first failure; `results` has the result of each call."""

    def __init__(self, message: str, code: int | None = None, results: Sequence[Any] = ()) -> None:
        super().__init__(message, code)
        self.results = list(results)
        """Results in the order of the calls. Each result is a distribution, or the SymError of that call."""


def one_line(message: str) -> str:
    """Return a message as one line. A name in it may hold line ends, terminal codes or bytes that are not UTF-8."""
    if message.isprintable():
        return message
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in message)


_NEVER_SENT = (StepFailed, BatchFailed)
"""Classes that `error_for` never makes from a reply. An EIO may have other causes than a step, and a batch gets a reply
for each call.
"""
_BY_ERRNO: dict[int, type[SymError]] = {cls.code: cls for cls in SymError.__subclasses__() if cls not in _NEVER_SENT}


def error_for(code: int, message: str) -> SymError:
    """Return the exception for an errno that the other side of a channel has sent."""
    return _BY_ERRNO.get(code, SymError)(message, code)
