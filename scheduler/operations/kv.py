"""Operations that create, open, fork, read, truncate and remove KV files.

KV_CLOSE is in `closing.py`. Operations that append are in `pred.py` and `generate.py`.
"""

from __future__ import annotations

from functools import partial

from kvfs.fs import FileSystem, OpenKv
from kvfs.pages.holdings import Kind
from libsym.abi import FORK_ENDED, MAX_FORKS, OPEN_WRITE, Op
from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import Invalid
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.connection.lip import MAX_LATER
from scheduler.connection.system_call import SystemCall
from scheduler.operations.models import Models
from scheduler.operations.opening import opened
from scheduler.operations.operation import Operation, Outcome, Table
from scheduler.wire.payloads import mode_of, text_of
from scheduler.wire.replies import Reply, json_reply

READ_ENTRIES = PAYLOAD_BYTES // 8
"""Maximum number of entries in one reply of KV_READ: a token and a position take 4 bytes each."""


class KvFiles:
    """Answers KV_CREATE, KV_OPEN, KV_FORK, KV_STAT, KV_READ, KV_REMOVE and KV_TRUNCATE."""

    def __init__(self, fs: FileSystem, batches: BatchScheduler, models: Models) -> None:
        self._fs = fs
        self._batches = batches
        self._models = models

    def table(self) -> Table:
        return {
            Op.KV_CREATE: Operation(self._create, opens=True),
            Op.KV_OPEN: Operation(self._open, max_waiting=MAX_LATER, opens=True),
            Op.KV_FORK: Operation(self._fork, is_of_its_file=True, opens=True),
            Op.KV_STAT: Operation(self._stat, is_of_its_file=True),
            Op.KV_READ: Operation(self._read, takes_payload=False, is_of_its_file=True),
            Op.KV_REMOVE: Operation(self._remove),
            Op.KV_TRUNCATE: Operation(self._truncate, takes_payload=False, is_of_its_file=True),
        }

    def _create(self, call: SystemCall) -> Reply:
        """Make a file of the connection's model, or of the model whose name follows the path and a NUL."""
        lip, request = call.lip, call.request
        path, _, name = text_of(request).partition("\0")
        arena = self._models.asked(lip, name).number
        return lip.opened(self._fs.kv_create(lip.credentials, path or None, mode_of(request), arena))

    def _open(self, call: SystemCall) -> Outcome:
        """Open a file, and hint to the pager that its pages are needed."""
        lip, request = call.lip, call.request
        write = bool(request.flags & OPEN_WRITE)
        return opened(self._fs, lip, self._fs.kv_open(lip.credentials, text_of(request), write=write))

    def _fork(self, call: SystemCall) -> Reply:
        lip, request = call.lip, call.request
        source = lip.file(request.handle)
        path, is_ended, count = text_of(request) or None, bool(request.flags & FORK_ENDED), request.args[1] or 1
        if not 1 <= count <= MAX_FORKS:
            raise Invalid(f"{count} forks in one call: 1 to {MAX_FORKS} are possible")
        if count > 1 and path is not None:
            raise Invalid(f"{count} forks can't all be {path}")
        lip.holdings.require(Kind.HANDLE, count)
        forks = list[OpenKv]()
        try:
            for _ in range(count):
                forks.append(self._fs.kv_fork(lip.credentials, source, path, mode_of(request), is_ended=is_ended))
        except BaseException:
            for fork in forks:
                self._fs.kv_close(fork)
            raise
        replies = [lip.opened(fork) for fork in forks]
        return replies[0]  # the handles are consecutive, and so are the numbers of the files

    def _stat(self, call: SystemCall) -> Reply:
        lip, request = call.lip, call.request
        if request.handle:
            return json_reply(self._fs.kv_stat_open(lip.file(request.handle))._asdict())
        return json_reply(self._fs.kv_stat(lip.credentials, text_of(request))._asdict())

    @staticmethod
    def _read(call: SystemCall) -> Reply:
        """Read entries from `first` on: as many as the caller wants, and at most as many as fit a message."""
        content = call.lip.file(call.request.handle).content
        first, wanted = call.request.args[:2]
        if first < 0 or wanted < 0:
            raise Invalid(f"kv_read() takes entries from 0 on, not {first} and {wanted} of them")
        length = content.table.length
        first = min(first, length)
        stop = min(first + min(wanted or READ_ENTRIES, READ_ENTRIES), length)
        tokens, positions = content.table.read(first, stop)
        return Reply((stop - first, length, content.cuts), tokens.tobytes() + positions.tobytes())

    def _remove(self, call: SystemCall) -> Reply:
        lip, request = call.lip, call.request
        if request.handle:
            self._fs.kv_remove_open(lip.credentials, lip.file(request.handle), text_of(request))
            lip.end_generations(request.handle)
        else:
            self._fs.kv_remove(lip.credentials, text_of(request))
        return Reply()

    def _truncate(self, call: SystemCall) -> None:
        """Truncate a file when all earlier calls on it are over."""
        handle, length = call.request.handle, call.request.args[0]
        file = call.lip.file(handle)
        if length < 0:
            raise Invalid(f"kv_truncate() cuts to 0 entries or more, not {length}")
        call.lip.end_generations(handle)

        def truncate() -> Reply:
            self._fs.kv_truncate(file, length)
            return Reply((length,))

        self._batches.exclusive(file, partial(call.answer_by, truncate))
