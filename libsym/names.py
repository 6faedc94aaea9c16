"""Calls on names and directories of the mount."""

from __future__ import annotations

import json
from typing import Any

from libsym.abi import Op
from libsym.arguments import Path, path_bytes, path_text
from libsym.calls import Call, Script
from libsym.info import KvEntry, parse, split_object

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


def rename_script(old: Path, new: Path) -> Script[None]:
    yield Call(Op.KV_RENAME, payload=json.dumps([path_text(old), path_text(new)]).encode())


def chmod_script(path: Path, mode: int) -> Script[None]:
    yield Call(Op.KV_CHMOD, args=(mode, 0, 0, 0), payload=path_bytes(path))


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
