"""kv_list: a directory of any size, in replies of a bounded one, without holding anybody up.

A reply holds as many names as fit, in order; its first argument says whether there are more, and the next request
names the last one that it has. Names that come or go between two requests may or may not be seen, as with readdir(3).
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
from scheduler.payloads import text_of
from scheduler.replies import Reply

FEW_NAMES = 500
"""Sorted at once (0.1 ms); more in a worker."""
NAMES_A_TURN = 64
"""Looked at before others get their turn: some 0.5 ms."""


class Listing:
    """Answers KV_LIST."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def table(self) -> Table:
        return {Op.KV_LIST: Operation(self.list, max_waiting=MAX_LATER)}

    def list(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """Find the directory, and whether it may be read; the coroutine does the rest."""
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
