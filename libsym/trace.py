"""Has the daemon tell what its scheduler does: for `symphony trace record`."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from libsym.abi import NO_TIMEOUT, Op
from libsym.channel.client import Stream
from libsym.channel.process import process
from libsym.channel.scripts import Call
from libsym.errors import SymError
from libsym.info import parse


class DaemonTrace:
    """A trace under way; for root and the daemon's own user."""

    def __init__(self, seconds: float | None = None, version: int = 1) -> None:
        """It ends after so long. None: when it is stopped. `version`: of the records that the caller knows."""
        milliseconds = NO_TIMEOUT if seconds is None else round(seconds * 1000)
        self._stream: Stream = process.channel().stream(Call(Op.TRACE, args=(milliseconds, version, 0, 0)))
        self._is_stopped = False
        first = self._stream.next()
        self.header: dict[str, Any] = parse(first.payload)
        """What is known of the daemon: see symphony-trace(5)."""

    def stop(self) -> None:
        """End it. What happened until now still comes."""
        self._is_stopped = True
        self._stream.cancel()

    def read(self, take: Callable[[int, int, int, bytes], None]) -> None:
        """Have `take` told of each block until the trace ends: its kind, its records and details, and their bytes.

        Ctrl-C ends the reading, not the trace: it may be stopped then, and read to its end.
        """
        try:
            while (reply := self._stream.next()).more:
                kind, num_records, num_details, _ = reply.args
                take(kind, num_records, num_details, bytes(reply.payload))
        except SymError as error:
            if not (self._is_stopped and error.errno == errno.ECANCELED):
                raise

    def close(self) -> None:
        """Nothing more is wanted."""
        self._stream.close()
