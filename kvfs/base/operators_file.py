"""Files that an operator names and the daemon obeys: a configuration, a policy. The daemon reads them while it runs."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from libsym.errors import Invalid


def read_operators_file(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of the file, at most `max_bytes` + 1. A caller that gets `max_bytes` + 1 bytes knows that the
    file is too large.

    A FIFO is refused, because a read of it would wait for a writer. OSError: the file can't be read. Invalid: every
    user may change the file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is a FIFO, and can't be read again")
        _require_not_for_all(path)
        data = b""
        while part := os.read(fd, max_bytes + 1 - len(data)):
            data += part
        return data
    finally:
        os.close(fd)


def _require_not_for_all(path: Path) -> None:
    """Raise Invalid if every user may write to the file, or put another file in its place.

    The check covers links to the file and the directories on its path. A directory with the sticky bit passes. A file
    that a group may write passes too, because the operator has chosen the group.
    """
    for name in (path.absolute(), path.resolve()):
        for where in (name, *name.parents):
            about = where.lstat()
            is_sticky = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
            may_all_write = about.st_mode & stat.S_IWOTH and not is_sticky
            if may_all_write and (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
                raise Invalid(f"{path}: all may write to {where}, and the daemon obeys the file: chmod o-w")
