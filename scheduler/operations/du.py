"""kv_du: report the costs of any number of files below a path, in replies of bounded size.

A reply has as many rows as fit, in the order of their paths. Its first argument says whether there are more rows, and
the next request gives the path of this reply's last row. The total, in which each page counts once, is a separate
request, and so are the totals of each model's files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from kvfs.facts.du import Denied, DuRow, by_model, total, walk
from kvfs.fs import FileSystem
from kvfs.names.inode import Inode
from kvfs.names.tree import Credentials
from libsym.abi import Du, Op
from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import Invalid
from scheduler.connection.lip import MAX_LATER
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.payloads import text_of
from scheduler.wire.replies import Reply, json_reply


class DiskUsage:
    """Answers KV_DU. The payload is a path and, behind a NUL, the path of the last row that the caller has."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def table(self) -> Table:
        return {Op.KV_DU: Operation(self.du, max_waiting=MAX_LATER)}

    def du(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """Find the directory and the name at which the listing begins. The coroutine collects the rows."""
        creds, wanted = call.lip.credentials, call.request.args[0]
        path, _, after = text_of(call.request).partition("\0")
        path = path or "."
        start = self._fs.find(creds, path)
        if wanted == Du.TOTAL:
            return self._total(start, path, creds)
        if wanted == Du.MODELS:
            return self._models(start, path, creds)
        if wanted != Du.ROWS:
            raise Invalid(f"kv_du() gives rows (0), their total (1) or a total for each model (2), not {wanted}")
        return self._rows(start, path, _names_below(path, after), creds)

    async def _total(self, start: Inode, path: str, creds: Credentials) -> Reply:
        return json_reply(asdict(await total(self._fs.pool, start, path, creds)))

    async def _models(self, start: Inode, path: str, creds: Credentials) -> Reply:
        rows = await by_model(self._fs.volume, start, path, creds)
        return json_reply({"rows": [asdict(row) for row in rows]})

    async def _rows(self, start: Inode, path: str, after: list[bytes], creds: Credentials) -> Reply:
        found: dict[str, list[str]] = {"rows": [], "denied": []}
        last = ""
        room = PAYLOAD_BYTES - len('{"rows":[],"denied":[],"last":}')
        has_more = False

        def take(row: DuRow | Denied, _inode: Inode) -> bool:
            nonlocal last, room, has_more
            text = json.dumps(asdict(row) if isinstance(row, DuRow) else row.path)
            needed = len(text) + len(",")
            # Twice, because the reply may repeat the row's path, which is shorter than the row, as `last`.
            if 2 * needed > room:
                has_more = True
                return False
            room -= needed
            found["rows" if isinstance(row, DuRow) else "denied"].append(text)
            last = row.path
            return True

        await walk(start, path, after, creds, take)
        rows, denied = (",".join(found[kind]) for kind in ("rows", "denied"))
        return Reply(
            (int(has_more),), f'{{"rows":[{rows}],"denied":[{denied}],"last":{json.dumps(last)}}}'.encode("ascii")
        )


def _names_below(path: str, last: str) -> list[bytes]:
    """Return the names that lead from the directory `path` to the path `last` below it. `walk` has made `last`."""
    if not last:
        return []
    if not last.startswith(path):
        raise Invalid(f"{last} does not lie below {path}")
    return [os.fsencode(name) for name in last.removeprefix(path).lstrip("/").split("/")]
