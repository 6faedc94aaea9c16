"""kv_sync: a program waits until its files would survive a power cut."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import trio

from kvfs.fs import FileSystem, OpenKv
from libsym.abi import Op
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.lip import MAX_WAITS
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.replies import Reply


class Syncing:
    """Answers KV_SYNC."""

    def __init__(self, fs: FileSystem, batches: BatchScheduler) -> None:
        self._fs = fs
        self._batches = batches

    def table(self) -> Table:
        return {Op.KV_SYNC: Operation(self._sync, takes_payload=False, max_waiting=MAX_WAITS)}

    def _sync(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """Sync the handle's file when all earlier calls on it are over. Without a handle, sync all files."""
        if not call.request.handle:
            return self._sync_all()
        return self._sync_file(call.lip.file(call.request.handle))

    async def _sync_file(self, file: OpenKv) -> Reply:
        is_free = trio.Event()
        self._batches.exclusive(file, is_free.set)
        await is_free.wait()
        await self._fs.sync(file)
        return Reply()

    async def _sync_all(self) -> Reply:
        await self._fs.volume.sync_all()
        return Reply()
