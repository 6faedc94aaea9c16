"""Which policy decides who goes to disk first: as the configuration says, and says otherwise when it is read again."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any, TypeAlias

from kvfs.tiers import loading
from kvfs.tiers.pager import Pager
from libsym.errors import Invalid
from symphony.config import NO_POLICY

log = logging.getLogger(__name__)

Stamp: TypeAlias = tuple[int, int, int]


class TierPolicy:
    """That of one daemon."""

    def __init__(self, pager: Pager, name: str) -> None:
        """Invalid: a file of the operator's is no policy."""
        self._pager = pager
        self._guarded: loading.Guarded | None = None
        self._stamp: Stamp | None = None
        """Of the file that was read."""
        self.name = name
        self._use(name)

    def use(self, name: str) -> None:
        """Decide by another one from now on; a file is read again. Invalid: it is none, and nothing has changed."""
        if NO_POLICY in (name, self.name) and name != self.name:
            raise Invalid(f"policy {self.name} can't become {name} while the daemon runs: start it again")
        self._use(name)
        self.name = name

    def is_stale(self) -> bool:
        """Its file is another by now, or the default decides in its place: a reload tries what the file says."""
        return self._guarded is not None and (self._guarded.failure is not None or _stamp_of(self.name) != self._stamp)

    def _use(self, name: str) -> None:
        stamp = _stamp_of(name)  # before it is read: what is written meanwhile is read again
        if name.endswith(".py"):
            _require_operators(name)
        rank = loading.load(loading.DEFAULT if name == NO_POLICY else name)
        before, self._guarded, self._stamp = self._guarded, None, stamp
        if name not in loading.NAMES and name != NO_POLICY:
            default = loading.NAMES[loading.DEFAULT]
            rank = self._guarded = loading.Guarded(rank, default, log=log, name=name)
        self._pager.use(rank)
        if before is not None:
            before.close()

    def info(self) -> dict[str, Any]:
        """For `symphony stat`."""
        return {"policy": self.name, "policy_error": "" if self._guarded is None else self._guarded.failure or ""}


def _require_operators(path: str) -> None:
    """Invalid: another user could change what the file holds, and the daemon would run that with its rights.

    Only this user and root own the file, the links to it and the directories on the way. Not everybody may write to
    them, but for sticky directories, where others replace no files of these two. A group is the operator's choice.
    """
    for name in (Path(path).absolute(), Path(path).resolve()):
        for where in (name, *name.parents):
            try:
                about = where.lstat()
            except OSError:
                return  # who reads it says why it can't be read
            if about.st_uid not in (0, os.geteuid()):
                raise Invalid(f"policy {path}: {where} belongs to uid {about.st_uid}, and the daemon runs it")
            is_sticky = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
            if about.st_mode & stat.S_IWOTH and not is_sticky and not stat.S_ISLNK(about.st_mode):
                raise Invalid(f"policy {path}: all may write to {where}, and the daemon runs it: chmod o-w")


def _stamp_of(path: str) -> Stamp | None:
    """None: there is no such file."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
