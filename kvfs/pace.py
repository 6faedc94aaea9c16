"""How fast requests for names and attributes are answered while the model computes.

A `find` over a large tree would take every core it can get, and a step of the model, whose threads wait for each
other, is as slow as the slowest of them. So such requests have a bounded share of the time while the decoder is busy:
a token bucket, so large that an interactive `ls` never meets its bottom. When the decoder is idle there is no limit.

Requests are counted, not timed: what one costs (10 to 20 us here, as much again in its client) varies less than what
a clock says on a machine that is full.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BURST = 128
"""Requests that may come at once: some 3 ms of work, an `ls -l` of sixty files."""

RATE_PER_S = 600
"""While busy: some 2 % of one core, here and in clients. Without a limit four `find` doubled a decode's time."""

QUANTUM = 6
"""Requests that are answered together once the bucket was empty. Whenever this thread and its clients wake up they push
a thread of the decoder off its core, and all the others wait for it: at the same rate, rarer is better."""

STAYS_BUSY_S = 0.02
"""Between two steps of a program that goes on at once the decoder is idle for less."""

LOOK_EVERY = 16
"""Requests between two looks while the decoder is idle: a look costs a tenth of what a request does."""


class Pace:
    """A token bucket that is full whenever the decoder has been idle for a moment."""

    __slots__ = ("_busy_until_s", "_clock", "_filled_s", "_is_busy", "_is_dry", "_tokens", "_unlooked", "is_free")

    def __init__(self, is_busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_busy = is_busy
        self._clock = clock
        self._busy_until_s = self._filled_s = clock()
        self._tokens = float(BURST)
        self._unlooked = 0
        self._is_dry = False
        self.is_free = True
        """Whether the decoder was idle when it was last looked at."""

    def admits(self) -> bool:
        """Whether one more request may be answered now; if so, it is counted."""
        if self._unlooked:
            self._unlooked -= 1
            return True
        now_s = self._clock()
        if self._is_busy():
            self._busy_until_s = now_s + STAYS_BUSY_S
        elif now_s >= self._busy_until_s:
            self._tokens = float(BURST)
            self._filled_s = now_s
            self._unlooked = LOOK_EVERY - 1
            self.is_free = True
            return True
        self.is_free = False
        self._tokens = min(BURST, self._tokens + (now_s - self._filled_s) * RATE_PER_S)
        self._filled_s = now_s
        if self._tokens < (QUANTUM if self._is_dry else 1):
            self._is_dry = True
            return False
        self._is_dry = False
        self._tokens -= 1
        return True

    def wait_s(self) -> float:
        """After how long the next request may be tried."""
        return max(0.0, ((QUANTUM if self._is_dry else 1) - self._tokens) / RATE_PER_S)
