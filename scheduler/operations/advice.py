"""kv_advise: a program's advice about the future use of its files."""

from __future__ import annotations

from kvfs.fs import FileSystem
from libsym.abi import ADVISED_STRUCT, MAX_ADVICE, Op
from libsym.errors import Invalid
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.payloads import text_of
from scheduler.wire.replies import Reply


class Advising:
    """Answers KV_ADVISE."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def table(self) -> Table:
        return {Op.KV_ADVISE: Operation(self._advise)}

    def _advise(self, call: SystemCall) -> Reply:
        """Take the advice. The payload is args[0] pairs of numbers, and then a path if the request has no handle."""
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
