"""kv_advise and kv_sync: what a program says about the future of its files, and asks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import trio

from kvfs.fs import FileSystem, OpenKv
from libsym.abi import ADVISED_STRUCT, MAX_ADVICE, Op
from libsym.errors import Invalid
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.lip import MAX_WAITS
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.payloads import text_of
from scheduler.replies import Reply


class Advising:
    """Answers KV_ADVISE and KV_SYNC."""

    def __init__(self, fs: FileSystem, batches: BatchScheduler) -> None:
        self._fs = fs
        self._batches = batches

    def table(self) -> Table:
        return {
            Op.KV_ADVISE: Operation(self._advise),
            Op.KV_SYNC: Operation(self._sync, takes_payload=False, max_waiting=MAX_WAITS),
        }

    def _advise(self, call: SystemCall) -> Reply:
        """The payload: args[0] pairs of numbers, and the path behind them if there is no handle."""
        lip, request = call.lip, call.request
        count = request.args[0]
        end = count * ADVISED_STRUCT.size
        if not 1 <= count <= MAX_ADVICE:
            raise Invalid(f"{count} pieces of advice: 1 to {MAX_ADVICE} can be given at once")
        if end > len(request.payload):
            raise Invalid(f"{count} pieces of advice need {end} bytes, not {len(request.payload)}")
        advice = list(ADVISED_STRUCT.iter_unpack(request.payload[:end]))
        if request.handle:
            self._fs.kv_advise_open(lip.credentials, lip.file(request.handle), advice)
        else:
            self._fs.kv_advise(lip.credentials, text_of(request, end), advice)
        return Reply()

    def _sync(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """Of one file when the calls before it are over, of everything without a handle."""
        if not call.request.handle:
            return self._sync_all()
        return self._sync_file(call.lip.file(call.request.handle))

    async def _sync_file(self, file: OpenKv) -> Reply:
        its_turn = trio.Event()
        self._batches.exclusive(file, its_turn.set)
        await its_turn.wait()
        await self._fs.sync(file)
        return Reply()

    async def _sync_all(self) -> Reply:
        await self._fs.volume.storage.sync_all()
        return Reply()
