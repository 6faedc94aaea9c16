"""How a daemon ends: who tells it to, how long that may take, and what becomes of what hangs.

The first SIGTERM or SIGINT begins the end, at whatever moment it comes. Later ones change nothing: an impatient second
Ctrl-C must not cut the unmounting short. What is bounded is the time:

    while it is built      nobody has seen the daemon yet: the process ends at once
    from then on           programs get NotConnected, the sockets go, the mount goes, what is not on disk is written
    `drain` later          what is not on disk is given up, and named in the log
    LAST_S after that      what hangs all the same is given up with the process, by a thread that needs nobody else

A process that ends itself like that leaves what kill -9 does: nothing that was synced is lost, and the lock is free.
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
"""For all that follows what `drain` bounds: joining threads, closing files."""
UNMOUNTED_S = 2.0
"""A lazy unmount waits for nobody, but for a processor."""

T = TypeVar("T")


class Ending:
    """The end of one daemon, begun or not."""

    def __init__(self, limit_s: float, mount: Path) -> None:
        self.begun = trio.Event()
        self.not_kept: list[str] = []
        """Names of files that are not on disk as they were."""
        self._limit_s = limit_s
        self._mount = mount
        self._ends_s = math.inf
        self._is_over = threading.Event()

    async def watch(self, signals: AsyncIterator[int]) -> None:
        """Begin the end when a signal says so. For ever."""
        async for number in signals:
            name = signal.Signals(number).name
            log.info("%s: closing" if not self.begun.is_set() else "%s: closing already", name)
            self.begin()

    def limit(self, limit_s: float) -> None:
        """How long it may take, if it has not begun."""
        if not self.begun.is_set():
            self._limit_s = limit_s

    def begin(self) -> None:
        """From now on time is counted. Again: nothing."""
        if self.begun.is_set():
            return
        self.begun.set()
        self._ends_s = time.monotonic() + self._limit_s
        threading.Thread(target=self._see_to_it, name="ending", daemon=True).start()

    def over(self) -> None:
        """Nothing is left to do."""
        self._is_over.set()

    @property
    def left_s(self) -> float:
        """How long the end may take from now on."""
        return max(0.0, self._ends_s - time.monotonic())

    async def unless_begun(self, build: Callable[[], T]) -> T:
        """What a worker builds that nobody sees yet. If the end begins meanwhile the process ends there, at once: a
        worker can't be taken out of what it does, and that is safe to be cut off anywhere.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._leave_when_begun)
            built = await trio.to_thread.run_sync(build)
            nursery.cancel_scope.cancel()
        return built

    def leave(self, status: int) -> NoReturn:
        """End the process around threads that hang: an interpreter that ends under them crashes."""
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)

    async def _leave_when_begun(self) -> None:
        await self.begun.wait()
        log.info("ended before it was there")
        self.leave(0)

    def _see_to_it(self) -> None:
        """In a thread of its own."""
        if self._is_over.wait(self._limit_s + LAST_S):
            return
        log.critical(
            "not over %g s after it was told to end: the process ends as by kill -9; what was synced is kept",
            self._limit_s + LAST_S,
        )
        with suppress(OSError, subprocess.TimeoutExpired):  # it is only tidy: whoever mounts there next clears it
            if f" {self._mount} " in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"):
                subprocess.run(["fusermount3", "-uzq", str(self._mount)], check=False, timeout=UNMOUNTED_S)
        self.leave(1)
