"""Sleep of the trio thread in C, which carries out calls that arrive meanwhile and need no Python.

Trio waits on an epoll of its own, and has no interface to replace it. So this module swaps trio's epoll for an object
that waits in `sym_gate_wait`: see `scheduler/core/waiting.c`.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio
from trio._core._run import GLOBAL_RUN_CONTEXT

from scheduler._loop import ffi, lib

log = logging.getLogger(__name__)


class Epoll:
    """Epoll that shows Python only the events that need Python."""

    def __init__(self, epoll: select.epoll, gate: Any, take_news: Callable[[], None]) -> None:
        """Wrap trio's epoll. `gate`: a `sym_gate`. `take_news` handles the news that the core has for Python."""
        self._fd, self._gate, self._take_news = epoll.fileno(), gate, take_news
        self._woken = ffi.new("sym_woken[]", lib.SYM_MAX_WOKEN)
        self.register, self.modify, self.unregister, self.close = (
            epoll.register,
            epoll.modify,
            epoll.unregister,
            epoll.close,
        )

    def poll(self, timeout: float, _max_events: int) -> list[tuple[int, int]]:
        """Wait for events, at most `timeout` seconds."""
        until_s = time.monotonic() + timeout
        while (count := self._wait(until_s)) == -errno.EINTR:
            pass  # Python runs its signal handlers here
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        if self._gate.pool.news:
            self._take_news()
        return [(each.fd, each.events) for each in self._woken[0:count]]

    def _wait(self, until_s: float) -> int:
        left_s = max(0.0, until_s - time.monotonic())
        return int(lib.sym_gate_wait(self._gate, self._fd, left_s, self._woken))


@contextmanager
def asleep(gate: Any, take_news: Callable[[], None]) -> Iterator[None]:
    """Have trio sleep in C within the block, in this thread.

    If trio already does so for another gate, nothing changes.
    """
    manager: Any = GLOBAL_RUN_CONTEXT.runner.io_manager
    epoll = getattr(manager, "_epoll", None)  # trio has no public name for it
    if not isinstance(epoll, select.epoll):
        if not isinstance(epoll, Epoll):
            log.warning("trio %s hides its epoll: each call wakes Python, and takes longer", trio.__version__)
        yield
        return
    manager._epoll = Epoll(epoll, gate, take_news)  # noqa: SLF001
    try:
        yield
    finally:
        manager._epoll = epoll  # noqa: SLF001
