"""Where a launcher has its socket and what its programs leave: a directory for each daemon, its user's own."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from symphony.launcher.statuses import FAILED

log = logging.getLogger(__name__)

_USERS = Path("/run/symphony/users")
"""Made by tmpfiles.d, sticky and for everybody: for users whose place in /tmp is taken."""


MAX_ERROR = 4096
"""Characters that are passed on of why a program can't be started: a path in it may be longer than a message."""


class Refused(Exception):  # noqa: N818 - what it says is what happens
    """Symphony can't do what was asked; `status` is what `symphony run` ends with."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of one launcher."""

    directory: Path
    daemon: str
    """The daemon's socket, absolute."""

    @property
    def key(self) -> str:
        """What no other launcher of the machine has."""
        return _digest(self.directory)

    @property
    def control(self) -> Path:
        return self.directory / "control"

    @property
    def lock(self) -> Path:
        """Held by the launcher as long as it lives."""
        return self.directory / "lock"

    @property
    def log(self) -> Path:
        """What the launcher itself has to say."""
        return self.directory / "launcher.log"

    @property
    def programs(self) -> Path:
        return self.directory / "programs"

    @property
    def programs_socket(self) -> str:
        """Where the daemon takes launchers."""
        return f"{self.daemon}.programs"


def find_places(daemon: str) -> Places:
    """The directory for the daemon at `daemon`; it may not be there yet."""
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
    return shared  # `make` sees whose it is


def shared_name(uid: int) -> Path:
    """Where a user without a runtime directory has the launcher's files, unless another user was there first."""
    return Path(f"/tmp/symphony-{uid}")  # noqa: S108 - `make` sees whose it is


def _among_users(uid: int) -> Path:
    """The directory that is the user's, whatever others have made there; else a name that nobody can guess."""
    own = sorted(each for each in _USERS.glob(f"{uid}-*") if not each.is_symlink() and _is_of(each, uid))
    return own[0] if own else _USERS / f"{uid}-{secrets.token_hex(8)}"


def _is_of(directory: Path, uid: int) -> bool:
    try:
        return directory.stat().st_uid == uid
    except OSError:
        return False


def make(places: Places) -> None:
    """Makes the directories that are missing. Refused: one is there that is not this user's alone."""
    for directory in (places.directory.parent, places.directory, places.programs):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.lstat()
        except OSError as error:
            raise Refused(f"the launcher's directory {directory} can't be made: {error.strerror}") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise Refused(f"{directory} is not a directory of yours alone (0700): remove it, or set XDG_RUNTIME_DIR")
