"""Where the daemon's socket is when nobody says so: where a daemon makes it, and where a program looks for it."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from libsym.errors import NoAccess

log = logging.getLogger(__name__)

_SYSTEM_SOCKET = Path("/run/symphony/symphony.sock")


def find_socket() -> Path:
    """Where a program looks: `default_socket()`; for an ordinary user without a daemon there, the system's daemon.

    NoAccess: another user has taken the place of the user's own, and there is no system's daemon. If there is one, a
    warning says so.
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
    """Where this user's daemon listens.

    $SYMPHONY_SOCKET; else root's /run/symphony/symphony.sock; else symphony.sock in the user's runtime directory.
    Without $XDG_RUNTIME_DIR that directory is /tmp/symphony-<uid>. Anybody could have made it, so it counts only if it
    is a real directory of the user's own that nobody else may enter.
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
    """Where a user without a runtime directory has sockets, unless another user was there first."""
    return Path(f"/tmp/symphony-{uid}")  # noqa: S108 - `check_private` sees whose it is


def programs_socket(socket: Path) -> Path:
    """Where the daemon that has this socket listens for launchers of programs."""
    return socket.with_name(f"{socket.name}.programs")


def make_socket_directory(socket: Path) -> None:
    """Makes the directory of a socket (the daemon does), 0700 unless it is there; /run is root's to share."""
    socket.parent.mkdir(mode=0o755 if os.getuid() == 0 else 0o700, parents=True, exist_ok=True)


def check_private(directory: Path, uid: int) -> None:
    """Raises NoAccess if `directory` exists and is not a directory of `uid` alone."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise NoAccess(
            f"{directory} is not a directory of yours alone (0700; it is uid {found.st_uid}'s): remove it, or set "
            "SYMPHONY_SOCKET"
        )
