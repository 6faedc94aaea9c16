"""The end of a daemon: the signals that begin it, its time limits, and how it deals with threads that hang.

The first SIGTERM or SIGINT begins the end, at any moment. Later signals change nothing: an impatient second Ctrl-C must
not interrupt the unmount. The time is bounded:

    while the daemon is built   the process ends immediately, since no user has seen the daemon yet
    from then on                programs get NotConnected, sockets are closed, KV is unmounted, changes are written back
    `drain` later               the daemon gives up changes that are not on disk yet, and the log names their files
    LAST_S after that           a thread that depends on no other thread ends the process, hanging threads included

Such a forced end leaves the disk as kill -9 does: synced files are kept, and the lock is free.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import trio

log = logging.getLogger(__name__)

LAST_S = 5.0
"""Time limit of the work after `drain`: joining threads, closing files."""
UNMOUNTED_S = 2.0
"""Time limit of a lazy unmount, which only needs processor time."""

T = TypeVar("T")


class Ending:
    """State of a daemon's end: whether it has begun, and when it must be over."""

    def __init__(self, limit_s: float, mount: Path) -> None:
        self.begun = trio.Event()
        self.not_kept: list[str] = []
        """Names of files whose changes are not on disk."""
        self._limit_s = limit_s
        self._mount = mount
        self._ends_s = math.inf
        self._is_over = threading.Event()

    async def watch(self, signals: AsyncIterator[int]) -> None:
        """Begin the end when a signal arrives. Runs until cancelled."""
        async for number in signals:
            name = signal.Signals(number).name
            log.info("%s: closing" if not self.begun.is_set() else "%s: closing already", name)
            self.begin()

    def limit(self, limit_s: float) -> None:
        """Set the time limit of the end, unless it has begun."""
        if not self.begun.is_set():
            self._limit_s = limit_s

    def begin(self) -> None:
        """Begin the end, and start its time limit. Later calls do nothing."""
        if self.begun.is_set():
            return
        self.begun.set()
        self._ends_s = time.monotonic() + self._limit_s
        threading.Thread(target=self._see_to_it, name="ending", daemon=True).start()

    def over(self) -> None:
        """Report that the end is complete, to the thread that watches the time."""
        self._is_over.set()

    @property
    def left_s(self) -> float:
        """Time that is left of the limit, in seconds."""
        return max(0.0, self._ends_s - time.monotonic())

    async def unless_begun(self, build: Callable[[], T]) -> T:
        """Run `build` on a worker thread, and return its result. If the end begins meanwhile, the process ends now.

        A worker can't be interrupted. The process may end anywhere in `build`, since no user sees its result yet.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._leave_when_begun)
            built = await trio.to_thread.run_sync(build)
            nursery.cancel_scope.cancel()
        return built

    def leave(self, status: int) -> NoReturn:
        """End the process immediately, even if threads hang. With such threads, a normal exit of Python would crash."""
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)

    async def _leave_when_begun(self) -> None:
        await self.begun.wait()
        log.info("ended before the daemon was ready")
        self.leave(0)

    def _see_to_it(self) -> None:
        """End the process if it outlives its time limit. Runs in a thread of its own."""
        if self._is_over.wait(self._limit_s + LAST_S):
            return
        log.critical(
            "not over %g s after it was told to end: the process ends as by kill -9; what was synced is kept",
            self._limit_s + LAST_S,
        )
        with suppress(OSError, subprocess.TimeoutExpired):  # best effort: the next daemon clears a stale mount
            if f" {self._mount} " in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"):
                subprocess.run(["fusermount3", "-uzq", str(self._mount)], check=False, timeout=UNMOUNTED_S)
        self.leave(1)
