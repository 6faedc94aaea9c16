"""The gateway's directory on the mount, opened so that no other user can replace it.

Each use opens the directory again, name by name from the root of the machine, and follows no link. Each directory on
the way is checked through its descriptor: it must belong to this user or root, and only its owner may write to it. A
sticky directory may be writable by all users, if the next name on the way belongs to this user or root. Files are
opened relative to the descriptor of their directory.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO

log = logging.getLogger(__name__)
LEGACY = "gateway"
"""Name of the directory up to version 0.2, the same for all users."""
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Place:
    """A directory of the gateway, by its path relative to the mount."""

    mount: str
    path: str

    @contextmanager
    def opened(self, *below: str, make: bool = False) -> Iterator[int]:
        """Open the directory, or a directory below it; with `make`, make missing directories on the mount.

        PermissionError: another user owns the directory, or may write to it or to a directory above it.
        """
        above, own = Path(os.path.realpath(self.mount)).parts[1:], PurePath(self.path).parts
        names, where = [*above, *own, *below], Path("/")
        fd = os.open(where, os.O_PATH | _DIRECTORY)
        try:
            for number, name in enumerate(names, 1):
                _check_others(fd, where)
                where /= name
                if make and number > len(above):
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=fd)
                outer, fd = fd, _next(fd, name, where, os.O_RDONLY if number == len(names) else os.O_PATH)
                os.close(outer)
                if number != len(above):  # the mount belongs to the daemon, which every program here trusts
                    _check_owner(fd, where, is_own=number >= len(above) + len(own))
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def file(self, below: str, name: str) -> Iterator[BinaryIO]:
        """Open a file for reading. `below`: the name of a directory in this directory, which has the file."""
        with self.opened(below) as directory, os.fdopen(open_file(name, directory), "rb") as found:
            yield found


def own_place(mount: str, wanted: str | None) -> Place:
    """Make and return the gateway's directory: `wanted`, or else `gateway-UID`.

    If only `gateway` from an earlier release exists, it stays in use.
    """
    own = f"{LEGACY}-{os.geteuid()}"
    if wanted is None:
        there = [name for name in (own, LEGACY) if os.path.lexists(Path(mount, name))]
        wanted = (there or [own])[0]
        if len(there) > 1 and Path(mount, LEGACY).lstat().st_uid == os.geteuid():
            log.warning("%s is used, and not %s: --directory %s is for that", own, LEGACY, LEGACY)
    path = PurePath(os.path.relpath(wanted, mount) if wanted.startswith("/") else wanted)
    if not path.parts or ".." in path.parts:
        raise OSError(errno.EINVAL, f"the gateway's directory is to be on the mount, below {mount}", wanted)
    place = Place(mount, str(path))
    with place.opened(make=True):
        return place


def open_file(name: str, directory: int, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user in an open directory. PermissionError: a link, or another user's file."""
    try:
        fd = os.open(name, flags | _FILE, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(errno.EPERM, "it is a link: the gateway makes none", name) from None
        raise
    about = os.fstat(fd)
    if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise PermissionError(errno.EPERM, f"it belongs to uid {about.st_uid}, or is no regular file", name)


def _next(outer: int, name: str, where: Path, flags: int) -> int:
    try:
        return os.open(name, flags | _DIRECTORY, dir_fd=outer)
    except NotADirectoryError:
        uid = os.lstat(name, dir_fd=outer).st_uid
        raise PermissionError(errno.EPERM, f"it is no directory, and belongs to uid {uid}{_WAY_OUT}", where) from None
    except PermissionError:
        uid = os.lstat(name, dir_fd=outer).st_uid
        raise PermissionError(errno.EPERM, f"it belongs to uid {uid}{_WAY_OUT}", where) from None


_WAY_OUT = "; --directory PATH names another directory on the mount"


def _check_others(fd: int, where: Path) -> None:
    """Refuse a directory on the way that other users may write to, unless it is sticky."""
    mode = os.fstat(fd).st_mode
    if mode & _OTHERS and not mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, "others may write to it: chmod go-w, or chmod +t", where)


def _check_owner(fd: int, where: Path, *, is_own: bool) -> None:
    """Refuse a directory with a wrong owner. `is_own`: the directory is the gateway's, or below it."""
    about = os.fstat(fd)
    if about.st_uid != os.geteuid() and (is_own or about.st_uid != 0):
        raise PermissionError(errno.EPERM, f"it belongs to uid {about.st_uid}{_WAY_OUT}", where)
    if is_own and about.st_mode & _OTHERS:
        raise PermissionError(errno.EPERM, f"others may write to it: chmod go-w {where}", where)
