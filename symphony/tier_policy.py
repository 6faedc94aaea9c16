"""The policy that decides who goes to disk first: as the configuration says, also when it is read again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from kvfs.tiers import loading
from kvfs.tiers.departures import Departures
from libsym.errors import Invalid
from symphony.config import NO_POLICY

log = logging.getLogger(__name__)

Stamp: TypeAlias = tuple[int, int, int]


class TierPolicy:
    """The policy of a daemon."""

    def __init__(self, departures: Departures, name: str) -> None:
        """Invalid: a file of the operator's is no policy."""
        self._departures = departures
        self._guarded: loading.Guarded | None = None
        self._stamp: Stamp | None = None
        """Of the file that was read."""
        self.name = name
        self._read(name)()

    def prepared(self, name: str) -> Callable[[], None] | None:
        """Return what has another policy decide from then on; None: nothing is to change.

        For a worker: the file may lie on the daemon's own mount, or on one that hangs. A file is read again if it has
        changed, or if the default decides in its place. Invalid: it is no policy.
        """
        if name == self.name and not self._is_stale():
            return None
        if NO_POLICY in (name, self.name):
            raise Invalid(f"policy {self.name} can't become {name} while the daemon runs: start it again")
        return self._read(name)

    def _is_stale(self) -> bool:
        return self._guarded is not None and (self._guarded.failure is not None or _stamp_of(self.name) != self._stamp)

    def _read(self, name: str) -> Callable[[], None]:
        stamp = _stamp_of(name)  # before it is read: what is written meanwhile is read again
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
        """For `symphony stat`."""
        return {"policy": self.name, "policy_error": "" if self._guarded is None else self._guarded.failure or ""}


def _require_operators(path: str) -> None:
    """Invalid: another user could change what the file holds, and the daemon would run that with its rights.

    Only this user and root own the file, the links to it and the directories on the way.
    """
    for name in (Path(path).absolute(), Path(path).resolve()):
        for where in (name, *name.parents):
            try:
                about = where.lstat()
            except OSError:
                return  # who reads it says why it can't be read
            if about.st_uid not in (0, os.geteuid()):
                raise Invalid(f"policy {path}: {where} belongs to uid {about.st_uid}, and the daemon runs it")


def _stamp_of(path: str) -> Stamp | None:
    """None: there is no such file."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
