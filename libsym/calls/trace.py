"""A trace: the daemon records the work of its scheduler, for `symphony trace record`."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from libsym.abi import NO_TIMEOUT, Op
from libsym.calls.info import parse
from libsym.channel.client import Stream
from libsym.channel.process import process
from libsym.channel.scripts import Call
from libsym.errors import SymError


class DaemonTrace:
    """A running trace. Only root and the daemon's own user may record a trace."""

    def __init__(self, seconds: float | None = None, version: int = 1) -> None:
        """Begin a trace that lasts `seconds`, or until `stop`. `version`: the version of records that the caller can
        read.
        """
        milliseconds = NO_TIMEOUT if seconds is None else round(seconds * 1000)
        self._stream: Stream = process.channel().stream(Call(Op.TRACE, args=(milliseconds, version, 0, 0)))
        self._is_stopped = False
        first = self._stream.next()
        self.header: dict[str, Any] = parse(first.payload)
        """Facts about the daemon: see symphony-trace(5)."""

    def stop(self) -> None:
        """End the trace. Records of earlier events still arrive."""
        self._is_stopped = True
        self._stream.cancel()

    def read(self, take: Callable[[int, int, int, bytes], None]) -> None:
        """Read blocks until the trace ends.

        For each block, call `take` with the block's kind, its number of records, its number of details, and its bytes.
        Ctrl-C ends the reading, not the trace: the caller can then stop the trace and read it to its end.
        """
        try:
            while (reply := self._stream.next()).more:
                kind, num_records, num_details, _ = reply.args
                take(kind, num_records, num_details, bytes(reply.payload))
        except SymError as error:
            if not (self._is_stopped and error.errno == errno.ECANCELED):
                raise

    def close(self) -> None:
        """Abandon the trace. No more records arrive."""
        self._stream.close()
