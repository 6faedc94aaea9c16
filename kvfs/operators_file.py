"""Files that an operator names: a configuration, a policy. The daemon obeys them, and reads them while it serves."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from libsym.errors import Invalid


def read_operators_file(path: Path, max_bytes: int) -> bytes:
    """Return its bytes: at most one more than `max_bytes`, so that the caller sees what is too large.

    A FIFO is refused: to read one waits for whoever writes. OSError: it can't be read.
    Invalid: everybody may change it.
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
    """Invalid: everybody may write to the file, or put another one in its place, and the daemon obeys what is in it.

    The links to it and the directories on the way count, but for sticky directories. A group is the operator's choice.
    """
    for name in (path.absolute(), path.resolve()):
        for where in (name, *name.parents):
            about = where.lstat()
            is_sticky = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
            may_all_write = about.st_mode & stat.S_IWOTH and not is_sticky
            if may_all_write and (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
                raise Invalid(f"{path}: all may write to {where}, and the daemon obeys it: chmod o-w")
