"""The default place of the daemon's socket, for the daemon that makes it and the programs that look for it."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from libsym.errors import NoAccess

log = logging.getLogger(__name__)

_SYSTEM_SOCKET = Path("/run/symphony/symphony.sock")


def find_socket() -> Path:
    """Return the socket to which a program connects: `default_socket()`, or else that of root's daemon.

    An ordinary user without a daemon of its own uses root's daemon. If another user has made the directory of this
    user's socket, a warning is logged, and root's daemon is used. NoAccess: another user has made that directory, and
    root has no daemon.
    """
    try:
        own = default_socket()
    except NoAccess as error:
        if not _SYSTEM_SOCKET.exists():
            raise
        log.warning("%s. Going on with the daemon at %s", error, _SYSTEM_SOCKET)
        return _SYSTEM_SOCKET
    if "SYMPHONY_SOCKET" not in os.environ and not own.exists() and _SYSTEM_SOCKET.exists():
        return _SYSTEM_SOCKET
    return own


def default_socket() -> Path:
    """Return the socket of this user's daemon.

    The socket is $SYMPHONY_SOCKET. Without it, root's socket is /run/symphony/symphony.sock, and another user's is
    symphony.sock in the runtime directory: $XDG_RUNTIME_DIR or /tmp/symphony-<uid>. Any user could have made a
    directory in /tmp. NoAccess: the directory in /tmp is not a real directory that belongs to the user, with access for
    the user alone.
    """
    if named := os.environ.get("SYMPHONY_SOCKET"):
        return Path(named)
    uid = os.getuid()
    if uid == 0:
        return _SYSTEM_SOCKET
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "symphony.sock"
    directory = shared_name(uid)
    check_private(directory, uid)
    return directory / "symphony.sock"


def shared_name(uid: int) -> Path:
    """Return the directory for sockets of a user without a runtime directory. The caller checks its owner."""
    return Path(f"/tmp/symphony-{uid}")  # noqa: S108 - `check_private` checks the owner


def programs_socket(socket: Path) -> Path:
    """Return the socket on which the same daemon listens for launchers."""
    return socket.with_name(f"{socket.name}.programs")


def make_socket_directory(socket: Path) -> None:
    """Make the directory of a daemon's socket, if it is missing. Its mode is 0700, for root 0755."""
    socket.parent.mkdir(mode=0o755 if os.getuid() == 0 else 0o700, parents=True, exist_ok=True)


def check_private(directory: Path, uid: int) -> None:
    """Raise NoAccess if a directory belongs to another user than `uid`, or gives other users access."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise NoAccess(
            f"{directory} is not a directory of yours alone (0700; it is uid {found.st_uid}'s): remove it, or set "
            "SYMPHONY_SOCKET"
        )
