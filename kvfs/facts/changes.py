"""Changes of KV files since an earlier change, as a user may see them.

A user sees a file that it can find by listing directories. A file without a name is seen by its own uid, by root, and
by connections that are confined to the domain that pays for the file, or to a domain around it. Facts that only readers
of a file may know are left out for all others. That a name has gone is told by the number of the file alone, and to all
users, because nothing is left whose rights could be asked. A confined connection hears of its domain only, and of
domains within it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs._pages import ffi, lib
from kvfs.facts.hot import path_for
from kvfs.names.inode import READ, Credentials, allows
from kvfs.pages.accounts import Account
from kvfs.volume.volume import Volume
from libsym.errors import NoSpace

LOOKED_AT = 32
"""Files and changes that one look describes, in some 0.3 ms, before other tasks may run."""


class FileChange(NamedTuple):
    """A KV file as it is now, or as it was when it went."""

    ino: int
    gone: bool = False
    path: str | None = None
    """A path from the root of the mount, or of the caller's domain. None: the file has no name."""
    uid: int = 0
    tokens: int = 0
    pages: int = 0
    readable: bool = False
    """Whether the caller may read the file. If not, the fields that follow have no facts."""
    origin: int = 0
    """Inode number of the file that this file was forked from since the daemon began. 0: none."""
    shared: int = 0
    """Number of first tokens that the file has in common with its origin, in the same pages."""
    memory_pages: int = 0
    program: str | None = None
    """Id of the program that opened the file for writing last."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the sequence of all files, and then of their changes."""

    since: int = 0
    """Number of the last change that was told. 0: the reader knows no file."""
    row: int = 0
    """Where the list of all files goes on. 0: the list is complete, or has not begun."""


class ChangesReader:
    """Reads changes on behalf of users. Nothing here awaits."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._core = volume.pool.core
        self._found = ffi.new("core_change[]", LOOKED_AT)

    @property
    def last(self) -> int:
        """The number of the last change."""
        return int(self._core.last_change)

    def watch(self) -> None:
        """Have `PagePool.changed` set at the next change."""
        self._core.is_watched = True

    def begin_anew(self) -> int:
        """Count a change after which readers have to begin anew, and return its number."""
        return int(lib.core_change_of_none(self._core))

    def look(self, place: Place, creds: Credentials) -> tuple[Place, bool, list[FileChange]]:
        """Return the next place, whether the list of all files begins anew, and what the user may see up to there."""
        if place.row:
            return self._all(place, creds, begins=False)
        since = ffi.new("int64_t *", place.since)
        num = lib.core_changes(self._core, since, self._found, LOOKED_AT)
        if num >= 0:
            return Place(since[0]), False, list(self._seen(num, creds))
        if (last := lib.core_begin_changes(self._core)) < 0:
            raise NoSpace("no memory for the changes of files")
        return self._all(Place(last), creds, begins=True)

    def _all(self, place: Place, creds: Credentials, *, begins: bool) -> tuple[Place, bool, list[FileChange]]:
        row = ffi.new("int32_t *", place.row)
        num = lib.core_all_files(self._core, row, self._found, LOOKED_AT)
        found = [change for change in self._seen(num, creds) if not change.gone]
        return Place(place.since, row[0] if row[0] < self._core.num_rows else 0), begins, found

    def _seen(self, num: int, creds: Credentials) -> Iterator[FileChange]:
        """Yield those of the first `num` changes that the user may see."""
        own = None if creds.root is None else creds.root.domain
        for at in range(num):
            core = self._found[at]
            change = (
                None
                if not core.number
                else self._gone(core, creds, own)
                if core.row < 0
                else self._file(core, creds, own)
            )
            if change is not None:
                yield change

    def _gone(self, core: Any, creds: Credentials, own: Account | None) -> FileChange | None:
        number = int(core.number)
        if creds.root is not None:
            is_seen = self._is_paid_by(own, core)
        else:
            is_seen = bool(core.is_name) or creds.uid in {0, core.uid}
        if not is_seen:
            return None
        if core.is_name:
            return FileChange(number, gone=True)
        is_older = self._volume.has_kv(number)  # an older version was closed
        return None if is_older else _described(core, None, gone=True)

    def _is_paid_by(self, own: Account | None, core: Any) -> bool:
        return own is not None and self._volume.pool.accounts.is_within(core.account, own)

    def _file(self, core: Any, creds: Credentials, own: Account | None) -> FileChange | None:
        inode, kv = self._volume.file_in(self._core, core.row)
        if inode is not None and inode.content is not kv:
            return None  # a version that only handles have
        uid = core.uid if inode is None else inode.uid
        if inode is None or not inode.names:
            if not (creds.uid in {0, uid} if creds.root is None else self._is_paid_by(own, core)):
                return None
            return _described(core, None)
        path = path_for(self._volume, inode, creds)
        if path is None:
            return None
        if allows(inode, creds, READ):
            return _described(core, path)
        return FileChange(core.number, path=path, uid=uid, tokens=core.length, pages=core.num_pages)


def _described(core: Any, path: str | None, *, gone: bool = False) -> FileChange:
    program = f"{core.program:08x}" if core.program else None
    return FileChange(
        core.number,
        gone,
        path,
        core.uid,
        core.length,
        core.num_pages,
        True,
        core.origin,
        core.shared,
        core.num_in_memory,
        program,
    )
