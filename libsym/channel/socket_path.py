"""Where the daemon's socket is when nobody says so: where a daemon makes it, and where a program looks for it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from libsym.errors import NoAccess

_SYSTEM_SOCKET = Path("/run/symphony/symphony.sock")


def find_socket() -> Path:
    """Where a program looks: `default_socket()`; for an ordinary user without a daemon there, the system's daemon."""
    own = default_socket()
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
    directory = Path(f"/tmp/symphony-{uid}")  # noqa: S108  # checked below to be the user's own
    check_private(directory, uid)
    return directory / "symphony.sock"


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
        raise NoAccess(f"{directory} is not a directory of yours alone (0700): remove it, or set SYMPHONY_SOCKET")
