"""kv_list: list a directory of any size, in replies of bounded size, while other tasks go on.

A reply has as many names as fit, in sorted order. Its first argument says whether there are more names, and the next
request gives the last name of this reply. As with readdir(3), a name that is added or removed between two requests may
or may not appear.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

import trio

from kvfs.fs import FileSystem
from kvfs.names.inode import Inode
from libsym.abi import Op
from libsym.channel.server import PAYLOAD_BYTES
from scheduler.connection.lip import MAX_LATER
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.payloads import text_of
from scheduler.wire.replies import Reply

FEW_NAMES = 500
"""Maximum number of names that are sorted on the trio thread (0.1 ms). A worker sorts more."""
NAMES_A_TURN = 64
"""Number of names that are read, in some 0.5 ms, before other tasks may run."""


class Listing:
    """Answers KV_LIST."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def table(self) -> Table:
        return {Op.KV_LIST: Operation(self.list, max_waiting=MAX_LATER)}

    def list(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """Find the directory, and check that the caller may read it. The coroutine reads the directory."""
        path, _, after = text_of(call.request).partition("\0")
        return self._list(self._fs.directory(call.lip.credentials, path), after.encode("utf-8", "surrogateescape"))

    async def _list(self, directory: Inode, after: bytes) -> Reply:
        names = list(directory.entries)
        if len(names) <= FEW_NAMES:
            names = _behind(names, after)
        else:
            names = await trio.to_thread.run_sync(_behind, names, after)
        found: list[bytes] = []
        room = PAYLOAD_BYTES - len("[]")
        for index, name in enumerate(names):
            if index % NAMES_A_TURN == NAMES_A_TURN - 1:
                await trio.lowlevel.checkpoint()
            inode = directory.entries.get(name)
            if inode is None:
                continue  # removed meanwhile
            entry = json.dumps(asdict(self._fs.entry(name, inode))).encode()
            room -= len(entry) + len(",")
            if room < 0:
                return _reply(found, more=True)
            found.append(entry)
        return _reply(found, more=False)


def _behind(names: list[bytes], after: bytes) -> list[bytes]:
    return sorted(name for name in names if name > after)


def _reply(entries: list[bytes], *, more: bool) -> Reply:
    return Reply((int(more),), b"[" + b",".join(entries) + b"]")
