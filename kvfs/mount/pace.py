"""How fast requests for names and attributes are answered while the model computes.

A `find` over a large tree would take every core it can get, and a step of the model, whose threads wait for each
other, is as slow as the slowest of them. So such requests have a bounded share of the time while the decoder is busy.
When the decoder is idle there is no limit.

Each user has a token bucket, so large that an interactive `ls` never meets its bottom. All that flows into buckets is
one rate, shared evenly among those that are not full: so a storm of one user's costs another nothing but half of what
both could have, and a hundred users together get no more than one.

Requests are counted, not timed: what one costs (10 to 20 us here, as much again in its client) varies less than what
a clock says on a machine that is full.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BURST = 128
"""Requests of a user that may come at once: some 3 ms of work, an `ls -l` of sixty files."""

RATE_PER_S = 600
"""While busy, of all users: some 2 % of one core, here and in clients. Without a limit four `find` doubled a decode's
time."""

QUANTUM = 6
"""Requests that are answered together once a bucket was empty. Whenever this thread and its clients wake up they push
a thread of the decoder off its core, and all the others wait for it: at the same rate, rarer is better."""

STAYS_BUSY_S = 0.02
"""Between two steps of a program that goes on at once the decoder is idle for less."""

LOOK_EVERY = 16
"""Requests between two looks while the decoder is idle: a look costs a tenth of what a request does."""

MAX_BUCKETS = 64
"""More users than that share a bucket, and get what is in it in turn. A user may have thousands of uids (subuid(5)),
and each new one has a burst."""

OTHERS = -1
"""Whose bucket that is."""


class _Bucket:
    __slots__ = ("is_dry", "tokens")

    def __init__(self) -> None:
        self.tokens = float(BURST)
        self.is_dry = False

    @property
    def wanted(self) -> int:
        """Tokens without which it gives none."""
        return QUANTUM if self.is_dry else 1


class Pace:
    """Token buckets that are full whenever the decoder has been idle for a moment."""

    __slots__ = ("_buckets", "_busy_until_s", "_clock", "_filled_s", "_is_busy", "_unlooked", "is_free")

    def __init__(self, is_busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_busy = is_busy
        self._clock = clock
        self._busy_until_s = self._filled_s = clock()
        self._buckets: dict[int, _Bucket] = {}
        """By user; those that are not full."""
        self._unlooked = 0
        self.is_free = True
        """Whether the decoder was idle when it was last looked at."""

    def payer(self, uid: int) -> int:
        """The user whose bucket a request of `uid` is taken from."""
        return uid if uid in self._buckets or len(self._buckets) < MAX_BUCKETS else OTHERS

    def admits(self, payer: int) -> bool:
        """Whether one more request of this user may be answered now; if so, it is counted."""
        if self._unlooked:
            self._unlooked -= 1
            return True
        now_s = self._clock()
        if self._is_busy():
            self._busy_until_s = now_s + STAYS_BUSY_S
        elif now_s >= self._busy_until_s:
            self._buckets.clear()
            self._filled_s = now_s
            self._unlooked = LOOK_EVERY - 1
            self.is_free = True
            return True
        self.is_free = False
        self._fill(now_s)
        bucket = self._buckets.get(payer)
        if bucket is None:
            bucket = self._buckets[payer] = _Bucket()
        bucket.is_dry = bucket.tokens < bucket.wanted
        bucket.tokens -= not bucket.is_dry
        return not bucket.is_dry

    def wait_s(self, payer: int) -> float:
        """After how long the next request of this user may be tried."""
        bucket = self._buckets.get(payer)
        return 0.0 if bucket is None else max(0.0, (bucket.wanted - bucket.tokens) * len(self._buckets) / RATE_PER_S)

    def _fill(self, now_s: float) -> None:
        if self._buckets:
            share = (now_s - self._filled_s) * RATE_PER_S / len(self._buckets)
            for user, bucket in tuple(self._buckets.items()):
                bucket.tokens += share
                if bucket.tokens >= BURST:
                    del self._buckets[user]
        self._filled_s = now_s
