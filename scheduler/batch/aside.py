"""The thread beside the run: it does long work in Python while the next step runs.

In this thread, grammars decide which tokens guided generations may draw: see `sym_loop_decide`. A grammar is Python and
Rust, and needs some 0.1 ms after each token; a step takes ten times as long or more. The thread also zeroes pages. Late
work delays only its own call, by a step.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from scheduler._loop import ffi, lib
from scheduler.batch.call import Decision

log = logging.getLogger(__name__)

MAX_DRAWN = 256
"""Maximum number of draws that the thread takes from the run at a time."""


@dataclass(frozen=True, slots=True)
class _Work:
    function: Callable[[], None]
    then: Callable[[Exception | None], None]
    token: trio.lowlevel.TrioToken


class Aside:
    """The thread beside one run. `add`, `remove` and `ask` belong to the trio thread."""

    def __init__(self) -> None:
        self.fd = -1
        """Eventfd that the run rings; -1 before `start`."""
        self._guided: dict[int, tuple[Any, Callable[[int], Decision]]] = {}
        """Guided generations by call number. Each has its `sym_generation` and the function that decides."""
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self, loop: Any) -> None:
        self.fd = os.eventfd(1, os.EFD_CLOEXEC)  # rung from the start: work may be queued already
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, args=(loop,), name="aside", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._is_closed = True
            os.eventfd_write(self.fd, 1)
            self._thread.join()
            os.close(self.fd)
            self.fd, self._thread = -1, None

    def add(self, number: int, state: Any, decide: Callable[[int], Decision]) -> None:
        """Add a guided generation. `state`: a `sym_generation`.

        `decide` returns the tokens that may be drawn next (see `GenerateCall.decide`). C reads this decision, so
        `decide` keeps it in memory until the next decision.
        """
        self._guided[number] = state, decide

    def remove(self, number: int) -> None:
        self._guided.pop(number, None)

    def ask(self, function: Callable[[], None], then: Callable[[Exception | None], None]) -> None:
        """Queue a function for the thread. Then the trio thread calls `then` with None or the function's error."""
        self._work.put(_Work(function, then, trio.lowlevel.current_trio_token()))
        if self._thread is not None:
            os.eventfd_write(self.fd, 1)

    def _run(self, loop: Any) -> None:
        drawn = ffi.new("int64_t[]", 2 * MAX_DRAWN)
        # The trio thread handles signals. A signal here would interrupt the read of the eventfd, without a retry.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            os.eventfd_read(self.fd)
            if self._is_closed:
                return
            is_busy = True
            while is_busy:
                count = lib.sym_loop_drawn(loop, drawn, MAX_DRAWN)
                for at in range(0, 2 * count, 2):
                    self._decide(loop, *drawn[at : at + 2])
                is_busy = count > 0 or not self._work.empty()
                if not self._work.empty():  # decisions and other work alternate: more draws may be waiting by now
                    _do(self._work.get())

    def _decide(self, loop: Any, number: int, token: int) -> None:
        guided = self._guided.get(number)
        if guided is None:
            return  # the generation has left the run, and asks again when it rejoins
        state, decide = guided
        decision = decide(token)
        forced = ffi.from_buffer("int32_t[]", decision.forced)
        allowed = ffi.NULL if decision.allowed is None else ffi.from_buffer(decision.allowed)
        lib.sym_loop_decide(loop, state, forced, len(decision.forced), allowed, decision.is_over)


def _do(work: _Work) -> None:
    error: Exception | None = None
    try:
        work.function()
    except Exception as failure:
        log.exception("work beside the run failed")
        error = failure
    work.token.run_sync_soon(work.then, error)
