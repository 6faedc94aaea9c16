"""Prefill of a text that is written to a KV file through the mount: one call after the other, each as large as a step.

One call is in flight at a time. Its callback submits the next call, so the decoder stays busy. Each call joins the end
of the file's queue, so other calls wait for at most one call of the prefill.
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
"""Tokens of one call: as many as a step without decodes computes. The file visibly grows with each call."""


class TextCall(FileCall):
    """Call that appends the next part of a text."""

    kind = CallKind.WRITTEN_TEXT
    caller: TextPrefill

    def end(self, error: SymError | None) -> None:
        self.caller.finished(error)


class TextPrefill:
    """Prefill of one file: a `Prefill` for kvfs, and the `Caller` of its own calls."""

    stream = lib.SYM_NO_STREAM
    """Stream of a call whose answer no program waits for."""

    def __init__(
        self,
        batches: BatchScheduler,
        file: OpenKv,
        pid: int,
        program: Program,
        failed: Callable[[SymError], None],
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a prefill without tokens. `program`: the writer. `failed` gets the error of a failed call.

        `stopped` is called when the prefill is over and its work is counted.
        """
        self.pid = pid
        self.program = program
        self.uid = file.inode.uid
        """User whose usage counts the calls: the file's owner."""
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
        """Queue more tokens."""
        self._waiting += tokens
        if not self._num_in_flight:
            self._submit()

    async def wait(self, num_queued: int) -> None:
        """Wait until at most `num_queued` tokens are queued. SymError: the prefill has failed."""
        while self._error is None and self.num_queued > num_queued:
            await self._changed.wait()
        if self._error is not None:
            raise SymError(str(self._error), self._error.errno)

    def stop(self, then: Callable[[], None]) -> None:
        """Forget queued tokens; call `then` as soon as no step works on the file."""
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
        """Continue after a call of the prefill.

        Tokens of a failed call still count as queued, because they are not computed.
        """
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
