"""Has the daemon read what it keeps on disk: for `symphony scrub` and `symphony fsck`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libsym.abi import SCRUB_REPAIR, Op
from libsym.channel.process import process
from libsym.channel.scripts import Call
from libsym.info import parse


def daemon_scrub(
    *, rate: int | None = None, repair: bool = False, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was read, and what was found; for root and the daemon's own user.

    `rate`: bytes a second at most. `progress` is told of the bytes read, and of those to be read.
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
