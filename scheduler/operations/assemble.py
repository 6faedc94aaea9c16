"""kv_extract and kv_merge: the short part runs on the trio thread, the long part in a worker."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from kvfs.fs import FileSystem
from kvfs.pages.assemble import Assembly
from libsym.abi import REBASE, Op
from libsym.channel.server import Request
from libsym.errors import Invalid
from scheduler.connection.lip import MAX_LATER, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.payloads import mode_of, text_of
from scheduler.wire.replies import Reply

NUM_WORKERS = 2
"""Maximum number of concurrent assemblies. Further assemblies wait, because steps need the cores."""


class Assembler:
    """Answers KV_EXTRACT and KV_MERGE. A wrong request fails before any work begins."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._workers = trio.CapacityLimiter(NUM_WORKERS)

    def table(self) -> Table:
        return {
            Op.KV_EXTRACT: Operation(self._extract, max_waiting=MAX_LATER, opens=True),
            Op.KV_MERGE: Operation(self._merge, max_waiting=MAX_LATER, opens=True),
        }

    def _extract(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """Hold the present state of the source, and return the coroutine that extracts entries from it."""
        lip, request = call.lip, call.request
        ranges, path = _numbers(request, np.dtype(np.int64), 2)
        source = lip.file(request.handle)
        assembly = self._fs.begin_extract(
            lip.credentials, source, ranges, path, mode_of(request), rebase=bool(request.flags & REBASE)
        )
        return self._assemble(lip, assembly, path, mode_of(request))

    def _merge(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """Hold the present state of the sources, and return the coroutine that merges them."""
        lip, request = call.lip, call.request
        handles, path = _numbers(request, np.dtype(np.uint64), 1)
        sources = [lip.file(handle) for handle in handles.ravel().tolist()]
        assembly = self._fs.begin_merge(
            lip.credentials, sources, path, mode_of(request), rebase=bool(request.flags & REBASE)
        )
        return self._assemble(lip, assembly, path, mode_of(request))

    async def _assemble(self, lip: Lip, assembly: Assembly, path: str | None, mode: int) -> Reply:
        """Assemble a file in workers. When the program ends, the workers stop at the next page."""
        try:
            await trio.to_thread.run_sync(assembly.plan, limiter=self._workers)
            num_new, pages = assembly.num_new_pages, assembly.pages_to_read()
            async with self._fs.volume.pager_of(assembly).hold_pages(pages, num_new, assembly.owner) as frames:
                assembly.reserve(frames)
                await trio.to_thread.run_sync(assembly.fill, trio.from_thread.check_cancelled, limiter=self._workers)
        except BaseException:
            self._fs.volume.abandon_assembly(assembly)
            raise
        file = self._fs.finish_assembly(lip.credentials, assembly, path, mode)
        return lip.opened(file)


def _numbers(request: Request, kind: np.dtype[Any], columns: int) -> tuple[npt.NDArray[Any], str | None]:
    """Return the numbers at the beginning of the payload, in `args[1]` rows, and the path behind them."""
    rows = request.args[1]
    end = rows * columns * kind.itemsize
    if not 0 <= rows <= len(request.payload) or end > len(request.payload):
        raise Invalid(f"{request.op.name} announced {rows} rows and sent {len(request.payload)} bytes")
    numbers = np.frombuffer(request.payload[:end], kind).reshape(rows, columns)
    return numbers, text_of(request, end) or None
