"""Pacing of requests for names and attributes while the model computes.

A `find` over a large tree would take every core that it can get. The threads of a model's step wait for each other, so
a step is as slow as its slowest thread. While the decoder is busy, requests for names and attributes therefore get only
a bounded share of the time. While the decoder is idle, they have no limit.

Each user has a token bucket that is large enough for an interactive `ls`. One total rate is shared evenly among the
buckets that are not full. So a storm of requests from one user takes at most half of the rate from another user. A
hundred users together get the same rate as a single user.

A bucket counts requests, not time. A request costs 10 to 20 us in the daemon, and as much again in its client. This
cost varies less than measured times do on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BURST = 128
"""Requests of a user that are answered without a wait: some 3 ms of work, an `ls -l` of a hundred files."""

RATE_PER_S = 600
"""Rate for all users together while the decoder is busy. These requests take some 2 % of one core, in the daemon and in
clients. Without a limit, four `find` doubled the time of a decode.
"""

QUANTUM = 6
"""Requests that are answered together after a bucket was empty. Each wake-up of the daemon's thread or of a client
pushes a thread of the decoder off its core, and the decoder's other threads wait for that thread. So wake-ups should be
rare.
"""

STAYS_BUSY_S = 0.02
"""Time for which the decoder counts as busy after a check has found it busy. The gap between two steps of a program is
shorter.
"""

LOOK_EVERY = 16
"""Requests between two checks of an idle decoder. A check costs a tenth of a request."""

MAX_BUCKETS = 64
"""The most users with a bucket of their own. Further users share one bucket, and are answered one after the other.
Without this limit, one user could have thousands of uids (subuid(5)), each with a burst of its own.
"""

OTHERS = -1
"""The payer that stands for all users of the shared bucket."""


class _Bucket:
    __slots__ = ("is_dry", "tokens")

    def __init__(self) -> None:
        self.tokens = float(BURST)
        self.is_dry = False

    @property
    def wanted(self) -> int:
        """How many tokens the bucket must have before a request may take one."""
        return QUANTUM if self.is_dry else 1


class Pace:
    """The token buckets of all users. Once the decoder has been idle for a moment, all buckets are full."""

    __slots__ = ("_buckets", "_busy_until_s", "_clock", "_filled_s", "_is_busy", "_unlooked", "is_free")

    def __init__(self, is_busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_busy = is_busy
        self._clock = clock
        self._busy_until_s = self._filled_s = clock()
        self._buckets: dict[int, _Bucket] = {}
        """Buckets that are not full, by user."""
        self._unlooked = 0
        self.is_free = True
        """Whether the decoder was idle at the last check."""

    def payer(self, uid: int) -> int:
        """Return the user whose bucket pays for a request of `uid`."""
        return uid if uid in self._buckets or len(self._buckets) < MAX_BUCKETS else OTHERS

    def admits(self, payer: int) -> bool:
        """Whether one more request of this payer may be answered now. If so, the request is counted."""
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
        """Return the time in seconds after which `admits` may be true for this payer."""
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
