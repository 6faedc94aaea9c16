"""The directory of a launcher, which holds its socket, its log, and its programs' files.

Each user has one launcher for each daemon. Each launcher has its own directory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from symphony.launcher.common.statuses import FAILED

log = logging.getLogger(__name__)

_USERS = Path("/run/symphony/users")
"""Fallback directory for a user if another user has taken the name in /tmp.
tmpfiles.d creates this directory with the sticky bit, writable for all users.
"""

MAX_ERROR = 4096
"""Maximum number of characters of the error that a failed start reports. The error may contain a very long path."""


class Refused(Exception):  # noqa: N818 - the name reads well as it is
    """Error: a request is refused or fails. `status`: the exit status that `symphony run` returns."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Places:
    """Paths of one launcher."""

    directory: Path
    daemon: str
    """Absolute path of the daemon's socket."""

    @property
    def key(self) -> str:
        """Key that is unique among the launchers of the machine."""
        return _digest(self.directory)

    @property
    def control(self) -> Path:
        return self.directory / "control"

    @property
    def lock(self) -> Path:
        """File that the launcher keeps locked as long as it runs."""
        return self.directory / "lock"

    @property
    def log(self) -> Path:
        """Log of the launcher itself."""
        return self.directory / "launcher.log"

    @property
    def programs(self) -> Path:
        return self.directory / "programs"

    @property
    def sent(self) -> Path:
        """Directory of the files that stand-ins of programs on other machines send."""
        return self.directory / "sent"

    @property
    def programs_socket(self) -> str:
        """Path of the daemon's socket for launchers."""
        return f"{self.daemon}.programs"


def find_places(daemon: str) -> Places:
    """Return the paths of the launcher for the daemon at the socket `daemon`. The directory may not exist yet."""
    return Places(_base() / _digest(daemon), daemon)


def _digest(path: str | Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def _base() -> Path:
    own, runtime, uid = os.environ.get("SYMPHONY_RUNTIME_DIR"), os.environ.get("XDG_RUNTIME_DIR"), os.getuid()
    if own and own.startswith("/"):
        return Path(own)
    if runtime and runtime.startswith("/") and _is_of(Path(runtime), uid):
        return Path(runtime) / "symphony"
    if uid == 0:
        return Path("/run/symphony/launcher")
    shared = shared_name(uid)
    if os.path.lexists(shared) and not _is_of(shared, uid) and _USERS.is_dir():
        found = _among_users(uid)
        log.warning("%s is another user's. The launcher's directory is %s", shared, found)
        return found
    return shared  # `make` checks its owner


def shared_name(uid: int) -> Path:
    """Return the launcher's directory for a user without a runtime directory. Another user may have taken it."""
    return Path(f"/tmp/symphony-{uid}")  # noqa: S108 - `make` checks its owner


def _among_users(uid: int) -> Path:
    """Return the directory below `_USERS` that the user owns.
    If there is none, return a new name that is hard to guess.
    """
    own = sorted(each for each in _USERS.glob(f"{uid}-*") if not each.is_symlink() and _is_of(each, uid))
    return own[0] if own else _USERS / f"{uid}-{secrets.token_hex(8)}"


def _is_of(directory: Path, uid: int) -> bool:
    try:
        return directory.stat().st_uid == uid
    except OSError:
        return False


def make(places: Places) -> None:
    """Make missing directories. Refused: another user owns a directory, or may access it."""
    for directory in (places.directory.parent, places.directory, places.programs):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.lstat()
        except OSError as error:
            raise Refused(f"the launcher's directory {directory} can't be made: {error.strerror}") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise Refused(f"{directory} is not a directory of yours alone (0700): remove it, or set XDG_RUNTIME_DIR")
