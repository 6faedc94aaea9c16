"""The launcher: serves clients and programs until it is idle, or until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal

from symphony.launcher.common.places import Places
from symphony.launcher.machine import processes
from symphony.launcher.supervising.control import Control
from symphony.launcher.supervising.daemon_link import Message
from symphony.launcher.supervising.daemon_requests import DaemonRequests
from symphony.launcher.supervising.supervisor import Supervisor
from symphony.launcher.zygote.zygote_start import StartedZygote

log = logging.getLogger(__name__)

COLLECTED = (700, 2, 2)
"""Thresholds of the garbage collector. An ended program leaves some forty objects in reference cycles, 10 KB.

With Python's defaults, a full collection would come every 1,500 programs; with these thresholds, every 100. Objects
that are older than the first program are frozen, so a collection takes less than a millisecond.
"""


class Launcher:
    """The launcher, which runs until it has been idle for `idle_s` seconds, or a signal ends it."""

    def __init__(self, places: Places, idle_s: float, zygote: StartedZygote) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._supervisor = Supervisor(places, zygote, self._asked, self._may_be_idle)
        self._requests = DaemonRequests(self._supervisor)
        self._control = Control(places, self._supervisor, self._may_be_idle)
        self._is_over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        handlers = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._is_over.set)
        for number, handler in {**handlers, signal.SIGCHLD: processes.reap}.items():
            self._loop.add_signal_handler(number, handler)
        gc.freeze()
        gc.set_threshold(*COLLECTED)
        self._may_be_idle()
        await self._is_over.wait()
        self._control.close()
        await self._supervisor.end_all()
        for number in (*handlers, signal.SIGCHLD):  # before asyncio closes the pipe that signals write to
            self._loop.remove_signal_handler(number)

    def _asked(self, request: Message) -> None:
        """Begin to serve a request of the daemon."""
        self._requests.begin(request)

    def _may_be_idle(self) -> None:
        """Restart the timer that ends an idle launcher."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._idle_s, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if not self._control.num_clients and not self._supervisor.living:
            self._is_over.set()


async def run(places: Places, ready: int, idle_s: float, zygote: StartedZygote) -> None:
    """Run a launcher, which writes a byte to `ready` when it listens."""
    launcher = Launcher(places, idle_s, zygote)
    os.write(ready, b"+")
    os.close(ready)
    await launcher.run()
