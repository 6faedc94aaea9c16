"""KV_RENAME, KV_MKDIR and KV_CHMOD: names of files and directories on the mount."""

from __future__ import annotations

from kvfs.fs import FileSystem
from libsym.abi import Op
from libsym.errors import Invalid
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.payloads import json_of, mode_of, text_of
from scheduler.wire.replies import Reply


class Names:
    """Answers KV_RENAME, KV_MKDIR and KV_CHMOD."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def table(self) -> Table:
        return {
            Op.KV_RENAME: Operation(self._rename),
            Op.KV_MKDIR: Operation(self._mkdir),
            Op.KV_CHMOD: Operation(self._chmod),
        }

    def _rename(self, call: SystemCall) -> Reply:
        names = json_of(call.request, call.request.payload, max_texts=2, max_other_bytes=64)
        if not (isinstance(names, list) and len(names) == 2 and all(isinstance(name, str) for name in names)):
            raise Invalid("rename takes two paths")
        return Reply(self._fs.kv_rename(call.lip.credentials, names[0], names[1]))

    def _mkdir(self, call: SystemCall) -> Reply:
        self._fs.kv_mkdir(call.lip.credentials, text_of(call.request), mode_of(call.request))
        return Reply()

    def _chmod(self, call: SystemCall) -> Reply:
        self._fs.kv_chmod(call.lip.credentials, text_of(call.request), mode_of(call.request))
        return Reply()
