"""A scrub: the daemon reads and checks its data on disk, for `symphony scrub` and `symphony fsck`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libsym.abi import SCRUB_REPAIR, Op
from libsym.calls.info import parse
from libsym.channel.process import process
from libsym.channel.scripts import Call


def daemon_scrub(
    *, rate: int | None = None, repair: bool = False, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Let the daemon read and check its data on disk; return the figures and the findings.

    Only root and the daemon's user may do this. `rate` limits the bytes a second. `progress` is called with the number
    of bytes read so far, and the number of all bytes to read.
    """
    findings: list[dict[str, Any]] = []
    stream = process.channel().stream(Call(Op.SCRUB, SCRUB_REPAIR if repair else 0, args=(rate or 0, 0, 0, 0)))
    try:
        while (reply := stream.next()).more:
            progress(reply.args[0], reply.args[1])
            if reply.payload:
                findings += parse(reply.payload)
        summary: dict[str, Any] = parse(reply.payload)
        return summary, findings
    finally:
        stream.close()
