"""A text on its way into a KV file: calls like any program's, a step's worth at a time.

One call is in flight at a time. The next one begins in the callback of the one before, so the decoder does not run dry;
each has its place at the end of the queue, so that nobody else waits for more than one of them.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import numpy as np
import trio

from kvfs.fs import OpenKv
from libsym.errors import SymError
from scheduler._loop import lib
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import FileCall
from scheduler.programs.program import Program
from scheduler.trace.records import CallKind

CALL_TOKENS = 512
"""Tokens of a step beside no decode: after each of these the file has grown, for everybody to see."""


class TextCall(FileCall):
    """Next part of a text."""

    kind = CallKind.WRITTEN_TEXT
    caller: TextPrefill

    def end(self, error: SymError | None) -> None:
        self.caller.finished(error)


class TextPrefill:
    """Satisfies kvfs's `Prefill`, and is the `Caller` of its own calls."""

    stream = lib.SYM_NO_STREAM
    """The mark of a call for whose answer nobody waits."""

    def __init__(
        self,
        batches: BatchScheduler,
        file: OpenKv,
        pid: int,
        program: Program,
        failed: Callable[[SymError], None],
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        """`program`: who writes. `stopped`: nothing more comes of it, and what did is counted."""
        self.pid = pid
        self.program = program
        self.uid = file.inode.uid
        """The file's owner: nobody else writes texts through the mount that his programs could not."""
        self._batches = batches
        self._file = file
        self._failed = failed
        self._stopped = stopped
        self._has_stopped = False
        self._waiting: list[int] = []
        self._num_in_flight = 0
        self._error: SymError | None = None
        self._changed = trio.Event()

    @property
    def num_queued(self) -> int:
        return len(self._waiting) + self._num_in_flight

    def append(self, tokens: Sequence[int]) -> None:
        """Queue some more."""
        self._waiting += tokens
        if not self._num_in_flight:
            self._submit()

    async def wait(self, num_queued: int) -> None:
        """Return when no more than so many are queued; raise what made it fail."""
        while self._error is None and self.num_queued > num_queued:
            await self._changed.wait()
        if self._error is not None:
            raise SymError(str(self._error), self._error.errno)

    def stop(self, then: Callable[[], None]) -> None:
        """Forget what is queued; call `then` as soon as no step works on the file."""
        if self._error is None:
            self._error = SymError("the prefill was stopped", errno.EINTR)
            self._notify()
        self._batches.drop(self)
        if not self._has_stopped:
            self._has_stopped = True
            self._stopped()
        self._batches.exclusive(self._file, then)

    def _submit(self) -> None:
        tokens = np.asarray(self._waiting[:CALL_TOKENS], np.int32)
        if self._error is None and tokens.size:
            del self._waiting[:CALL_TOKENS]
            self._num_in_flight = len(tokens)
            self._batches.submit(TextCall(self, self._file, tokens, None))

    def finished(self, error: SymError | None) -> None:
        """A call is over; what failed still counts as queued, for it is not computed."""
        if error is None:
            self._num_in_flight = 0
            self._submit()
        else:
            self._error = error
            self._failed(error)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
