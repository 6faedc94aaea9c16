"""SCRUB: read all pages on disk while other work goes on, and report the progress and the findings."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from kvfs.durable.findings import Finding
from kvfs.durable.keeper import Keeper
from kvfs.durable.scrub import scrub
from kvfs.fs import FileSystem
from libsym.abi import SCRUB_REPAIR, Op
from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import Busy, Invalid, NotSupported
from scheduler.connection.lip import MAX_LATER
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table, require_operator
from scheduler.wire.replies import Reply

_MAX_PATH_CHARS = 4096
"""Maximum number of characters of a path in a reply. The log has the whole path."""
_MAX_PATHS = 64
"""Maximum number of paths of one file in a reply. A file may have many hard links."""


class Scrubbing:
    """Answers SCRUB. One scrub at a time may run."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._is_under_way = False

    def table(self) -> Table:
        return {Op.SCRUB: Operation(self._scrub, takes_payload=False, max_waiting=MAX_LATER)}

    def _scrub(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        require_operator(call, "have its disk read")
        rate, keeper = call.request.args[0], self._fs.volume.storage
        if rate < 0:
            raise Invalid(f"{rate} bytes a second: 1 or more, or 0 for no limit")
        if not isinstance(keeper, Keeper):
            raise NotSupported("this daemon keeps nothing on disk")
        if self._is_under_way:
            raise Busy("a scrub is under way already: wait until it is over")
        return self._run(call, keeper, rate or None)

    async def _run(self, call: SystemCall, keeper: Keeper, rate: int | None) -> Reply:
        def progress(done: int, total: int) -> None:
            if not call.lip.channel.num_waiting_replies:  # a program that does not read gets only the result
                call.send((done, total))

        self._is_under_way = True
        try:
            repair = bool(call.request.flags & SCRUB_REPAIR)
            found = await scrub(self._fs.volume, keeper, rate=rate, repair=repair, progress=progress)
        finally:
            self._is_under_way = False
        for payload in _payloads(found.findings):
            call.send((found.num_bytes, found.num_bytes), payload)
        summary = {"num_pages": found.num_pages, "num_bytes": found.num_bytes, "seconds": round(found.seconds, 3)}
        return Reply((found.num_bytes, found.num_bytes), json.dumps(summary).encode())


def _payloads(findings: Iterable[Finding]) -> Iterator[bytes]:
    """Yield payloads, each with as many findings as fit."""
    texts: list[str] = []
    room = PAYLOAD_BYTES
    for finding in findings:
        paths = [path[:_MAX_PATH_CHARS] for path in finding.paths[:_MAX_PATHS]]
        text = json.dumps(asdict(finding) | {"paths": paths})
        if len(text) + len(",") > room - len("[]"):
            yield f"[{','.join(texts)}]".encode()
            texts, room = [], PAYLOAD_BYTES
        texts.append(text)
        room -= len(text) + len(",")
    if texts:
        yield f"[{','.join(texts)}]".encode()
