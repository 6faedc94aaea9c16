"""Calls on names and directories of the mount."""

from __future__ import annotations

import json
from posixpath import basename, dirname
from typing import Any

from libsym.abi import Op
from libsym.arguments import Path, path_bytes, path_text, permissions
from libsym.channel.client import ClientChannel
from libsym.channel.scripts import Call, Script
from libsym.errors import Exists, NotFound
from libsym.info import KvEntry, parse, split_object
from libsym.kv import stat_script

_TOTAL = 1
"""KV_DU: the sum, not the rows."""


def list_script(path: Path = ".") -> Script[list[KvEntry]]:
    wanted, found, more = path_bytes(path), list[KvEntry](), 1
    while more:
        behind = b"\0" + path_bytes(found[-1].name) if found else b""
        reply = yield Call(Op.KV_LIST, payload=wanted + behind)
        found += [KvEntry(**split_object(KvEntry, entry)[0]) for entry in parse(reply.payload)]
        more = reply.args[0]
    return found


def mkdir_script(path: Path, mode: int = 0o700, *, parents: bool = False) -> Script[None]:
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
            if not parents or (yield from stat_script(missing[-1])).kind != "dir":
                raise
            missing.pop()
        else:
            missing.pop()


def _nearest(path: str) -> str:
    """The directory of a path that could be made: what `.` and `..` end in is there as soon as what is before it is."""
    while (last := basename(path := path.rstrip("/"))) in {".", ".."}:
        path = path.removesuffix(last)
    return path


def rename_script(channel: ClientChannel, old: Path, new: Path) -> Script[None]:
    """Files that this program has open by the name follow it."""
    names = path_text(old), path_text(new)
    reply = yield Call(Op.KV_RENAME, payload=json.dumps(names).encode())
    inode, left, entered, _ = reply.args
    for reference in channel.named_files.valuerefs():
        file = reference()
        if file is not None:
            file.moved(*names, inode, left, entered)


def chmod_script(path: Path, mode: int) -> Script[None]:
    yield Call(Op.KV_CHMOD, args=(permissions(mode), 0, 0, 0), payload=path_bytes(path))


def du_script(path: Path = ".") -> Script[dict[str, Any]]:
    """Rows come in windows; the daemon sums them up itself, for it counts each page once."""
    wanted, last, more = path_bytes(path), b"", 1
    found: dict[str, Any] = {"rows": [], "total": {}, "denied": []}
    while more:
        reply = yield Call(Op.KV_DU, payload=wanted + (b"\0" + last if last else b""))
        window = parse(reply.payload)
        found["rows"] += window["rows"]
        found["denied"] += window["denied"]
        more, last = reply.args[0], path_bytes(window["last"]) if window["last"] else b""
    reply = yield Call(Op.KV_DU, args=(_TOTAL, 0, 0, 0), payload=wanted)
    found["total"] = parse(reply.payload)
    return found
