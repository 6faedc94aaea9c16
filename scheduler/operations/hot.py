"""kv_hot: list the most used files that the caller may see."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

import trio

from kvfs.facts.hot import hot_files
from kvfs.fs import FileSystem
from libsym.abi import Op
from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import Invalid
from scheduler.connection.lip import MAX_LATER
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.replies import Reply

MAX_FILES = 1000
FILES_A_TURN = 16
"""Number of files that are read, in some 0.3 ms, before other tasks may run. A file of a million tokens takes 0.03 ms.
"""


class Hot:
    """Answers KV_HOT."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def table(self) -> Table:
        return {Op.KV_HOT: Operation(self.hot, takes_payload=False, max_waiting=MAX_LATER)}

    def hot(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """List at most args[0] files."""
        limit = call.request.args[0]
        if not 1 <= limit <= MAX_FILES:
            raise Invalid(f"kv_hot() tells of 1 to {MAX_FILES} files, not of {limit}")
        return self._hot(call, limit)

    async def _hot(self, call: SystemCall, limit: int) -> Reply:
        rows, room = dict[str, str](), PAYLOAD_BYTES - len("[]")
        for index, file in enumerate(hot_files(self._fs.volume, call.lip.credentials)):
            if index % FILES_A_TURN == FILES_A_TURN - 1:
                await trio.lowlevel.checkpoint()
            if file is None:
                continue
            row = json.dumps(asdict(file))
            room -= len(row) + len(",")
            if room < 0 or len(rows) == limit:
                break
            rows[file.path] = row  # a file that was renamed meanwhile may have an earlier row's path
        return Reply((), f"[{','.join(rows.values())}]".encode("ascii"))
