"""The thread beside the run: it does what takes long and is Python's, while the next step runs.

It decides what guided generations may draw (see `sym_loop_decide`): a grammar is Python's and Rust's, and after a token
was drawn it takes some 0.1 ms to say what may follow; a step takes ten times as long or more. And it zeroes pages. What
is late costs its own call a step, and no other anything.
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
"""Looked at at once."""


@dataclass(frozen=True, slots=True)
class _Work:
    function: Callable[[], None]
    then: Callable[[Exception | None], None]
    token: trio.lowlevel.TrioToken


class Aside:
    """Of one run. `add`, `remove` and `ask` are the trio thread's."""

    def __init__(self) -> None:
        self.fd = -1
        """Rung by the run; none before it starts."""
        self._guided: dict[int, tuple[Any, Callable[[int], Decision]]] = {}
        """By the call's number."""
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self, loop: Any) -> None:
        self.fd = os.eventfd(1, os.EFD_CLOEXEC)  # something may have been asked for already
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
        """`state`: a `sym_generation`. `decide` says what may be drawn next (see `GenerateCall.decide`), and keeps the
        decision until the next one: C reads it.
        """
        self._guided[number] = state, decide

    def remove(self, number: int) -> None:
        self._guided.pop(number, None)

    def ask(self, function: Callable[[], None], then: Callable[[Exception | None], None]) -> None:
        """Have something done, behind what it is doing; `then` is told on the trio thread, of what went wrong, too."""
        self._work.put(_Work(function, then, trio.lowlevel.current_trio_token()))
        if self._thread is not None:
            os.eventfd_write(self.fd, 1)

    def _run(self, loop: Any) -> None:
        drawn = ffi.new("int64_t[]", 2 * MAX_DRAWN)
        # Signals are the trio thread's: Python does not go on with a read of an eventfd that one has interrupted.
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
                if not self._work.empty():  # something may be drawn again already: both take turns
                    _do(self._work.get())

    def _decide(self, loop: Any, number: int, token: int) -> None:
        guided = self._guided.get(number)
        if guided is None:
            return  # it has left, and asks again when it comes back
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
        log.exception("what was to be done beside the run failed")
        error = failure
    work.token.run_sync_soon(work.then, error)
