"""kv_advise and kv_sync: what a program says about the future of its files, and asks."""

from __future__ import annotations

from kvfs.fs import FileSystem
from libsym.abi import ADVISED_STRUCT, MAX_ADVICE
from libsym.channel.server import Request
from libsym.errors import Invalid, NotSupported
from scheduler.connection.lip import Lip
from scheduler.payloads import text_of
from scheduler.replies import Reply


class Advising:
    """Answers KV_ADVISE, and says for KV_SYNC what can't be promised."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def advise(self, lip: Lip, request: Request) -> Reply:
        """The payload: args[0] pairs of numbers, and the path behind them if there is no handle."""
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

    @staticmethod
    def refuse_sync(_lip: Lip, _request: Request) -> Reply:
        """When the calls before it are over: a 0 would be a promise that this release can't keep."""
        raise NotSupported(
            "nothing on the mount outlives the daemon in this release: to keep a file, copy it out (cp a.kv ~/a.kv)"
        )
