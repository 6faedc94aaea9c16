"""The thread that runs steps, so that the next batch forms while this one computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import outcome
import trio


class StepThread:
    """One daemon thread that runs one function at a time and wakes the trio thread with its outcome."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], None], trio.lowlevel.Task, trio.lowlevel.TrioToken] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], None]) -> None:
        """Run `function` in the thread; a step that has begun is always waited for, even when cancelled."""
        self._work.put((function, trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()))
        await trio.lowlevel.wait_task_rescheduled(lambda _raise_cancel: trio.lowlevel.Abort.FAILED)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._do(*work)
            del work  # a step has hold of the memory of its programs, and the next one may be long in coming

    @staticmethod
    def _do(function: Callable[[], None], task: trio.lowlevel.Task, token: trio.lowlevel.TrioToken) -> None:
        result = outcome.capture(function)
        token.run_sync_soon(trio.lowlevel.reschedule, task, result)
