"""Loading and reloading of the daemon's tier policy, which ranks files for eviction."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from kvfs.tiers import loading
from kvfs.tiers.departures import Departures
from libsym.errors import Invalid
from symphony.settings.config import NO_POLICY

log = logging.getLogger(__name__)

Stamp: TypeAlias = tuple[int, int, int]


class TierPolicy:
    """The tier policy in use, loaded by its name in the configuration."""

    def __init__(self, departures: Departures, name: str) -> None:
        """Load the policy `name`. Invalid: `name` is a file that is not a policy."""
        self._departures = departures
        self._guarded: loading.Guarded | None = None
        self._stamp: Stamp | None = None
        """Inode, modification time and size of the policy's file when the file was read."""
        self.name = name
        self._read(name)()

    def prepared(self, name: str) -> Callable[[], None] | None:
        """Read the policy `name`, and return a function that puts it to use. None: nothing has to change.

        Runs on a worker thread: the file may lie on the daemon's own mount, or on a mount that hangs. The file of the
        present policy is read again if it has changed, or if the policy failed and the default runs in its place.
        Invalid: `name` is not a policy.
        """
        if name == self.name and not self._is_stale():
            return None
        if NO_POLICY in (name, self.name):
            raise Invalid(f"policy {self.name} can't become {name} while the daemon runs: start it again")
        return self._read(name)

    def _is_stale(self) -> bool:
        return self._guarded is not None and (self._guarded.failure is not None or _stamp_of(self.name) != self._stamp)

    def _read(self, name: str) -> Callable[[], None]:
        stamp = _stamp_of(name)  # before the read, so that a file that changes meanwhile is read again
        if name.endswith(".py"):
            _require_operators(name)
        rank = loading.load(loading.DEFAULT if name == NO_POLICY else name)

        def use() -> None:
            before, self._guarded, self._stamp, self.name = self._guarded, None, stamp, name
            used = rank
            if name not in loading.NAMES and name != NO_POLICY:
                default = loading.NAMES[loading.DEFAULT]
                used = self._guarded = loading.Guarded(rank, default, log=log, name=name)
            self._departures.use(used)
            if before is not None:
                before.close()

        return use

    def info(self) -> dict[str, Any]:
        """Return the policy's name and failure, for `symphony stat`."""
        return {"policy": self.name, "policy_error": "" if self._guarded is None else self._guarded.failure or ""}


def _require_operators(path: str) -> None:
    """Check that the daemon's user or root owns a policy's file, the links to it, and all directories above it.

    Invalid: another user could change the file, and the daemon would run it with its own rights.
    """
    for name in (Path(path).absolute(), Path(path).resolve()):
        for where in (name, *name.parents):
            try:
                about = where.lstat()
            except OSError:
                return  # the read that follows will report this error
            if about.st_uid not in (0, os.geteuid()):
                raise Invalid(f"policy {path}: {where} belongs to uid {about.st_uid}, and the daemon runs it")


def _stamp_of(path: str) -> Stamp | None:
    """Return the inode, modification time and size of a file. None: the file does not exist."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
