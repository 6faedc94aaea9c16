"""Calls on names and directories of the mount."""

from __future__ import annotations

import json
from posixpath import basename, dirname
from typing import Any

from libsym.abi import Du, Op
from libsym.arguments import Path, int64, path_bytes, path_text, permissions
from libsym.calls.faces import script_of, system_call
from libsym.calls.info import HotFile, KvEntry, parse, split_object
from libsym.calls.kv import kv_stat
from libsym.channel.scripts import Call, Script
from libsym.errors import Exists, NotFound


@system_call
def kv_list(path: Path = ".") -> Script[list[KvEntry]]:
    """List the names in a directory of the mount, sorted. Without a path, list the root.

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
    """Make a directory. `parents`: also make missing directories above it, with the same mode, as `mkdir -p` does.

    With `parents`, a directory that exists is no error.

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
    """Return a path without `.` and `..` at its end. These two names exist in every directory."""
    while (last := basename(path := path.rstrip("/"))) in {".", ".."}:
        path = path.removesuffix(last)
    return path


@system_call
def kv_rename(old: Path, new: Path) -> Script[None]:
    """Rename a file or directory, as rename(2) does. An existing file of the new name is replaced.

    A KV that this program has opened by the old name gets the new `path`. Renames by other programs, or of a directory
    above the file, do not change `path`.

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
    """Change the permission bits of a file.

    >>> sym.kv_create("a.kv").close()
    >>> sym.kv_chmod("a.kv", 0o644)
    >>> oct(sym.kv_stat("a.kv").mode)
    '0o644'
    """
    yield Call(Op.KV_CHMOD, args=(permissions(mode), 0, 0, 0), payload=path_bytes(path))


@system_call
def kv_du(path: Path = ".", *, by_model: bool = False) -> Script[dict[str, Any]]:
    """Return the cost of the files below a path, in tokens and pages: a row for each file, and the total.

    A row of a KV file has tokens, pages, `exclusive_pages` and `shared_pages`. A row of a plain file has `plain_bytes`.
    `exclusive_pages` and `shared_pages` are None if the caller may not read the file. `total` counts each page once,
    even if several files share it. Its `exclusive_pages` and `shared_pages` cover the files that the caller may read.
    `denied` names the directories that were left out, because the caller may not read them or their paths are too long.
    The result may or may not show changes that other programs make during the call.

    `by_model`: a row for each model, with the sum over its KV files, in place of a row for each file. The row's `path`
    is the model's name and precision, and a fingerprint if another model has the same name. Files of models that the
    daemon does not serve count, too. Files that the caller may not read count in the total alone.

    >>> with sym.kv_create("base.kv") as base:
    ...     length = sym.kv_write(base, [1] * 64)
    ...     sym.kv_fork(base, "fork.kv").close()
    >>> [(row["path"], row["pages"], row["exclusive_pages"]) for row in sym.kv_du()["rows"]]
    [('./base.kv', 2, 0), ('./fork.kv', 2, 0)]
    >>> sym.kv_du()["total"]["pages"]
    2
    >>> [(row["path"], row["pages"]) for row in sym.kv_du(by_model=True)["rows"]]
    [('tiny bf16', 2)]
    >>> sym.kv_remove("base.kv")
    >>> sym.kv_remove("fork.kv")
    """
    # Rows arrive in several messages. The daemon computes the total, since only it can count each page once.
    wanted, last, more = path_bytes(path), b"", 1
    found: dict[str, Any] = {"rows": [], "total": {}, "denied": []}
    while more:
        reply = yield Call(Op.KV_DU, payload=wanted + (b"\0" + last if last else b""))
        window = parse(reply.payload)
        found["rows"] += window["rows"]
        found["denied"] += window["denied"]
        more, last = reply.args[0], path_bytes(window["last"]) if window["last"] else b""
    if by_model:
        found["rows"] = parse((yield Call(Op.KV_DU, args=(Du.MODELS, 0, 0, 0), payload=wanted)).payload)["rows"]
    reply = yield Call(Op.KV_DU, args=(Du.TOTAL, 0, 0, 0), payload=wanted)
    found["total"] = parse(reply.payload)
    return found


@system_call
def kv_hot(limit: int = 100) -> Script[list[HotFile]]:
    """List at most `limit` KV files, the most used first.

    Opening, forking, reading on the mount and appending count as use. The list has only files that this program may
    read, in directories that it may list. The daemon remembers a few hundred files of each owner, and of all owners
    together. So if a user has many files, and other users use theirs more, the list may lack some of that user's files.

    >>> with sym.kv_create("often.kv") as kv:
    ...     length = sym.kv_write(kv, [1] * 40)
    >>> file = sym.kv_hot(1)[0]
    >>> file.path, file.tokens, file.pages, 0 < file.heat < 1
    ('often.kv', 40, 2, True)
    """
    reply = yield Call(Op.KV_HOT, args=(int64(limit, "limit"), 0, 0, 0))
    return [HotFile(**split_object(HotFile, file)[0]) for file in parse(reply.payload)]
