"""kv_advise and kv_sync: what a program says about the future of its files, and asks."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from kvfs.fs import FileSystem
from libsym.abi import ADVISED_STRUCT, MAX_ADVICE, Op
from libsym.errors import Invalid, NotSupported
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.payloads import text_of
from scheduler.replies import Reply


class Advising:
    """Answers KV_ADVISE, and says for KV_SYNC what can't be promised."""

    def __init__(self, fs: FileSystem, batches: BatchScheduler) -> None:
        self._fs = fs
        self._batches = batches

    def table(self) -> Table:
        return {
            Op.KV_ADVISE: Operation(self._advise),
            Op.KV_SYNC: Operation(self._sync, takes_payload=False),
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

    def _sync(self, call: SystemCall) -> None:
        """When the calls before it are over."""
        self._batches.exclusive(call.lip.file(call.request.handle), partial(call.answer_by, _refuse_sync))


def _refuse_sync() -> NoReturn:
    """A 0 would be a promise that this release can't keep."""
    raise NotSupported(
        "nothing on the mount outlives the daemon in this release: to keep a file, copy it out (cp a.kv ~/a.kv)"
    )
