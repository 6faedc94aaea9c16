"""KV_CLOSE, and other reasons to close a handle: a claim is taken back, or a program ends.

A file is closed once no earlier call on its handle is in flight.
"""

from __future__ import annotations

from functools import partial

from kvfs.fs import FileSystem, OpenKv
from libsym.abi import Op
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.locks import Locking
from scheduler.operations.operation import Operation, Table
from scheduler.wire.replies import Reply


class Closing:
    """Answers KV_CLOSE."""

    def __init__(self, fs: FileSystem, batches: BatchScheduler, locking: Locking) -> None:
        self._fs = fs
        self._batches = batches
        self._locking = locking

    def table(self) -> Table:
        return {Op.KV_CLOSE: Operation(self._close, takes_payload=False, is_of_its_file=True)}

    def _close(self, call: SystemCall) -> None:
        file = self._end(call.lip, call.request.handle)

        def close() -> Reply:
            self._fs.kv_close(file)
            return Reply()

        self._batches.when_unused(file, partial(call.answer_by, close))

    def close_handle(self, lip: Lip, handle: int) -> None:
        """Close a handle as KV_CLOSE does, without an answer."""
        self._close_unused(self._end(lip, handle))

    def close_some(self, lip: Lip, count: int) -> None:
        """Close `count` files of a program that has ended."""
        count -= lip.handles.close_branches(count)
        self._fs.pool.take_news()
        for file in lip.take(count):
            self._close_unused(file)

    def _end(self, lip: Lip, handle: int) -> OpenKv:
        file = lip.remove(handle)
        self._locking.end_waits(file)
        return file

    def _close_unused(self, file: OpenKv) -> None:
        self._batches.when_unused(file, partial(self._fs.kv_close, file))
