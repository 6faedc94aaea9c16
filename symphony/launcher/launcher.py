"""The launcher: its loop, from when it listens until nobody needs it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal

from symphony.launcher import processes
from symphony.launcher.control import Control
from symphony.launcher.daemon_link import Message
from symphony.launcher.daemon_requests import DaemonRequests
from symphony.launcher.places import Places
from symphony.launcher.supervisor import Supervisor
from symphony.launcher.zygote_start import Started

log = logging.getLogger(__name__)

COLLECTED = (700, 2, 2)
"""A program that has ended leaves some forty objects in cycles, 10 KB. By default they were looked for once in 1,500
programs, now in 100; all that is there before the first program is left alone, so that takes less than a millisecond.
"""


class Launcher:
    """Runs until nobody needs it for `idle_s` seconds, or somebody ends it."""

    def __init__(self, places: Places, idle_s: float, zygote: Started) -> None:
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
        for number in (*handlers, signal.SIGCHLD):  # asyncio does so only after it has closed what they write to
            self._loop.remove_signal_handler(number)

    def _asked(self, request: Message) -> None:
        """The daemon asks for something."""
        self._requests.begin(request)

    def _may_be_idle(self) -> None:
        """Begin the time after which a launcher without programs ends."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._idle_s, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if not self._control.num_clients and not self._supervisor.living:
            self._is_over.set()


async def run(places: Places, ready: int, idle_s: float, zygote: Started) -> None:
    """Tells `ready` when it listens."""
    launcher = Launcher(places, idle_s, zygote)
    os.write(ready, b"+")
    os.close(ready)
    await launcher.run()
