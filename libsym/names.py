"""Calls on names and directories of the mount."""

from __future__ import annotations

import json
from posixpath import basename, dirname
from typing import Any

from libsym.abi import Du, Op
from libsym.arguments import Path, int64, path_bytes, path_text, permissions
from libsym.channel.scripts import Call, Script
from libsym.errors import Exists, NotFound
from libsym.faces import script_of, system_call
from libsym.info import HotFile, KvEntry, parse, split_object
from libsym.kv import kv_stat


@system_call
def kv_list(path: Path = ".") -> Script[list[KvEntry]]:
    """The names in a directory of the mount, sorted; without a path in its root.

    >>> sym.kv_create("b.kv").close()
    >>> sym.kv_create("a.kv").close()
    >>> [entry.name for entry in sym.kv_list()]
    ['a.kv', 'b.kv']
    """
    wanted, found, more = path_bytes(path), list[KvEntry](), 1
    while more:
        behind = b"\0" + path_bytes(found[-1].name) if found else b""
        reply = yield Call(Op.KV_LIST, payload=wanted + behind)
        found += [KvEntry(**split_object(KvEntry, entry)[0]) for entry in parse(reply.payload)]
        more = reply.args[0]
    return found


@system_call
def kv_mkdir(path: Path, mode: int = 0o700, *, parents: bool = False) -> Script[None]:
    """Makes a directory. With `parents` also those on the way, of the same mode, and one that is there is fine.

    >>> sym.kv_mkdir("docs/2026", parents=True)
    >>> sym.kv_mkdir("docs/2026", parents=True)
    >>> [(entry.name, entry.kind) for entry in sym.kv_list("docs")]
    [('2026', 'dir')]
    """
    missing = [path_text(path)]
    if parents:
        missing = [nearest for nearest in [_nearest(missing[0])] if nearest]
    while missing:
        try:
            yield Call(Op.KV_MKDIR, args=(permissions(mode), 0, 0, 0), payload=path_bytes(missing[-1]))
        except NotFound:
            above = _nearest(dirname(missing[-1].rstrip("/")))
            if not parents or not above:
                raise
            missing.append(above)
        except Exists:
            if not parents or (yield from script_of(kv_stat)(missing[-1])).kind != "dir":
                raise
            missing.pop()
        else:
            missing.pop()


def _nearest(path: str) -> str:
    """The directory of a path that could be made: what `.` and `..` end in is there as soon as what is before it is."""
    while (last := basename(path := path.rstrip("/"))) in {".", ".."}:
        path = path.removesuffix(last)
    return path


@system_call
def kv_rename(old: Path, new: Path) -> Script[None]:
    """Moves a name, over an existing one if there is one, as rename(2).

    The `path` of a KV that this program has open by the name follows. What others move, or a directory on the way, does
    not show there.

    >>> sym.kv_create("a.kv").close()
    >>> sym.kv_rename("a.kv", "b.kv")
    >>> [entry.name for entry in sym.kv_list()]
    ['b.kv']
    """
    names = path_text(old), path_text(new)
    reply = yield Call(Op.KV_RENAME, payload=json.dumps(names).encode())
    inode, left, entered, _ = reply.args
    for reference in reply.channel.named_files.valuerefs():
        file = reference()
        if file is not None:
            file.moved(*names, inode, left, entered)


@system_call
def kv_chmod(path: Path, mode: int) -> Script[None]:
    """Changes the permission bits of a file.

    >>> sym.kv_create("a.kv").close()
    >>> sym.kv_chmod("a.kv", 0o644)
    >>> oct(sym.kv_stat("a.kv").mode)
    '0o644'
    """
    yield Call(Op.KV_CHMOD, args=(permissions(mode), 0, 0, 0), payload=path_bytes(path))


@system_call
def kv_du(path: Path = ".") -> Script[dict[str, Any]]:
    """What the files below a path cost: `rows` and their `total`, in tokens, pages, exclusive and shared pages.

    Plain files have `plain_bytes` instead. `exclusive_pages` and `shared_pages` are None of files that may not be read;
    in the total they are of those that may be. In it each page counts once, however many files share it. `denied` names
    the directories that were not looked into: they may not be read, or their paths are too long to be used. What others
    change meanwhile may or may not show.

    >>> with sym.kv_create("base.kv") as base:
    ...     length = sym.kv_write(base, [1] * 64)
    ...     sym.kv_fork(base, "fork.kv").close()
    >>> [(row["path"], row["pages"], row["exclusive_pages"]) for row in sym.kv_du()["rows"]]
    [('./base.kv', 2, 0), ('./fork.kv', 2, 0)]
    >>> sym.kv_du()["total"]["pages"]
    2
    >>> sym.kv_remove("base.kv")
    >>> sym.kv_remove("fork.kv")
    """
    # Rows come in windows. The daemon sums them up itself, for it counts each page once.
    wanted, last, more = path_bytes(path), b"", 1
    found: dict[str, Any] = {"rows": [], "total": {}, "denied": []}
    while more:
        reply = yield Call(Op.KV_DU, payload=wanted + (b"\0" + last if last else b""))
        window = parse(reply.payload)
        found["rows"] += window["rows"]
        found["denied"] += window["denied"]
        more, last = reply.args[0], path_bytes(window["last"]) if window["last"] else b""
    reply = yield Call(Op.KV_DU, args=(Du.TOTAL, 0, 0, 0), payload=wanted)
    found["total"] = parse(reply.payload)
    return found


@system_call
def kv_hot(limit: int = 100) -> Script[list[HotFile]]:
    """The KV files that are used most, the hottest first: at most `limit` of them.

    To use a file is to open it, to fork it, to read it on the mount, or to append to it. Only files are told that this
    program may read, in directories that it may list. Of each owner, and of all files together, the daemon remembers
    some hundreds: whose own files are many, and used less than those of others, may miss some.

    >>> with sym.kv_create("often.kv") as kv:
    ...     length = sym.kv_write(kv, [1] * 40)
    >>> file = sym.kv_hot(1)[0]
    >>> file.path, file.tokens, file.pages, 0 < file.heat < 1
    ('often.kv', 40, 2, True)
    """
    reply = yield Call(Op.KV_HOT, args=(int64(limit, "limit"), 0, 0, 0))
    return [HotFile(**split_object(HotFile, file)[0]) for file in parse(reply.payload)]
