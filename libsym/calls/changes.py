"""kv_changes: what has happened to KV files since an earlier call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from libsym.abi import Op
from libsym.arguments import int64, wait_ms
from libsym.calls.faces import system_call
from libsym.calls.info import parse, split_object
from libsym.channel.scripts import Call, Script


@dataclass(frozen=True, slots=True)
class KvChange:
    """A KV file as it is now, or as it was when it went.

    If `readable` is false, the program may not read the file: `origin`, `shared`, `memory_pages` and `program` are
    unknown then, and have their defaults.

    >>> kv = sym.kv_create("a.kv")
    >>> fork = sym.kv_fork(kv)
    >>> change = next(each for each in sym.kv_changes().files if each.ino == sym.kv_stat(fork).ino)
    >>> change.path, change.origin == sym.kv_stat(kv).ino
    (None, True)
    """

    ino: int
    """Inode number of the file. Numbers are not used again while the daemon runs."""
    gone: bool = False
    """Whether the file was removed, or closed as a file without a name. Such a file may have no further facts."""
    path: str | None = None
    """A path of the file, from the root of the mount or of the connection's domain. None: the file has no name."""
    uid: int = 0
    tokens: int = 0
    pages: int = 0
    readable: bool = False
    """Whether this program may read the file."""
    origin: int = 0
    """Inode number of the file that this file was forked from since the daemon began. 0: none."""
    shared: int = 0
    """Number of first tokens that the file has had in common with its origin since the fork, in the same pages."""
    memory_pages: int = 0
    """Number of pages that were in memory when the file changed last."""
    program: str | None = None
    """Id of the program that made the file, or opened it for writing later: see `programs`. None: unknown."""


@dataclass(frozen=True, slots=True)
class KvChanges:
    """KV files that have changed, as `kv_changes` returns them.

    >>> sym.KvChanges(since=7, whole=False, files=[]).since
    7
    """

    since: int
    """Number to pass to the next call."""
    whole: bool
    """Whether `files` are all files, and not only those that have changed. The program forgets what it knew before."""
    files: list[KvChange]
    """The files, each one once. A later change of a file stands behind earlier changes of other files."""


@system_call
def kv_changes(since: int = 0, *, timeout: float | None = 0) -> Script[KvChanges]:
    """Return the KV files that were made, forked, renamed, closed or removed, or that have grown, since a number.

    The first call returns all files, and a number for the next call. If the daemon does not know any more what has
    changed since a number, or the rights on a directory have changed, the call returns all files, too, and says so.
    Files that were forked, opened and closed by programs without a name belong to the files while they live.

    The result has the files that the program could find by listing directories. Files without a name are those of its
    own user, or of the connection's domain; root gets all of them. If nothing has changed, the call waits for `timeout`
    seconds (None: for ever), and then returns no files.

    >>> before = sym.kv_changes()
    >>> with sym.kv_create("a.kv") as kv:
    ...     length = sym.kv_write(kv, [1] * 40)
    >>> now = sym.kv_changes(before.since)
    >>> [(file.path, file.tokens, file.pages, file.gone) for file in now.files]
    [('a.kv', 40, 2, False)]
    >>> sym.kv_changes(now.since).files
    []
    """
    place, row, whole, found = int64(since, "since"), 0, False, dict[int, KvChange]()
    while True:
        reply = yield Call(Op.KV_CHANGES, args=(place, row, wait_ms(timeout), 0))
        place, row, _, begins = reply.args
        if begins:
            whole, found = True, {}
        for file in parse(reply.payload):
            change = _change(file)
            found.pop(change.ino, None)
            if not (whole and change.gone):
                found[change.ino] = change
        if not row:
            return KvChanges(place, whole, list(found.values()))


def _change(file: Any) -> KvChange:
    return KvChange(**split_object(KvChange, file)[0])
