"""A replay of loads through `scheduler/batch/streams.c`, beside the best fixed wait, on a clock of its own.

A step of n calls takes a base and so much a call. Plain loops think between two calls, for half to three halves of a
mean. Branches think for a tenth of a millisecond, and then wait for the main thread, which needs so long for each of
them. One replay chooses the fixed wait, and another one, with other numbers, compares the two.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from scheduler._loop import ffi, lib
from scheduler.batch.standing import WAIT_MAX_NS, WAIT_MIN_NS, WAIT_PERCENT

MS = 1_000_000
FIXED_MS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 20.0, 25.0, 30.0, 40.0)
ACCOUNT, PROGRAM = 1, 2


@dataclass(frozen=True)
class Load:
    """Streams of one program, with their work between an answer and the next call."""

    num_streams: int
    think_ms: float
    main_ms: float = 0.0
    """Time of the daemon's main thread for each call, during which other calls wait."""


class Streams:
    """The daemon's own table of streams and its decisions, for one connection."""

    def __init__(self, step_ms: tuple[float, float]) -> None:
        self._streams = ffi.gc(lib.sym_streams_new(), lib.sym_streams_free)
        self._connection = lib.sym_streams_connect(self._streams)
        self._shares = ffi.new("sym_share[3]", [(0, 0, 1, (0, 0), parent, 0) for parent in (-1, 0, ACCOUNT)])
        self._cost = ffi.new("sym_cost *")
        base_ms, call_ms = step_ms
        self._cost.rows_ns = [(base_ms + call_ms * 2**knot) * MS for knot in range(len(self._cost.rows_ns))]
        self._wait = ffi.new("sym_wait *", (WAIT_PERCENT, WAIT_MIN_NS, WAIT_MAX_NS))
        self._limits = ffi.new("sym_limits *", {"max_calls": 256})
        self._work, self._ready = ffi.new("sym_work *"), ffi.new("sym_ready *")

    def called(self, stream: int, earliest_ns: int, latest_ns: int) -> None:
        lib.sym_streams_called(self._streams, self._connection, 1 + stream, PROGRAM, earliest_ns, latest_ns)

    def answered(self, stream: int, now_ns: int) -> None:
        lib.sym_streams_over(self._streams, self._connection, 1 + stream, 1, now_ns)

    def wait_until(self, num_ready: int, began_ns: int, now_ns: int) -> int:
        ready = self._ready
        ready.num_calls, ready.began_ns = num_ready, began_ns
        ready.account = ACCOUNT if num_ready else lib.SYM_NOBODY
        return int(
            lib.sym_streams_wait_until(
                self._streams, ready, self._wait, self._limits, self._cost, self._work, 1, self._shares, now_ns
            )
        )


class Machine:
    """Steps that follow each other, streams that come back, and a main thread between them."""

    def __init__(self, load: Load, step_ms: tuple[float, float], seed: int, fixed_ms: float | None = None) -> None:
        self._load, self._step_ms, self._random = load, step_ms, random.Random(seed)
        self._streams = Streams(step_ms)
        self._fixed_ns = None if fixed_ms is None else int(fixed_ms * MS)
        self._coming = [(self._random.randrange(MS), stream) for stream in range(load.num_streams)]
        heapq.heapify(self._coming)
        self._ready: list[int] = []
        self._now_ns = self._looked_ns = self._main_free_ns = 0
        self.num_calls = self.num_steps = 0

    def run(self, ms: float) -> float:
        """The calls of a second."""
        while self._now_ns < ms * MS:
            began_ns = self._now_ns
            while (until_ns := self._wait_until(began_ns)) > self._now_ns:
                self._now_ns = min(until_ns, self._coming[0][0])
            if self._ready:
                self._step()
            else:  # asleep
                self._now_ns = self._coming[0][0]
        return 1e9 * self.num_calls / self._now_ns

    def _wait_until(self, began_ns: int) -> int:
        while self._coming and self._coming[0][0] <= self._now_ns:
            came_ns, stream = heapq.heappop(self._coming)
            earliest_ns = came_ns if self._load.main_ms else self._looked_ns  # nobody looks at rings while a step runs
            self._streams.called(stream, earliest_ns, self._now_ns if not self._load.main_ms else came_ns)
            self._ready.append(stream)
        self._looked_ns = self._now_ns
        if not self._coming:
            return self._now_ns
        if self._fixed_ns is None:
            return self._streams.wait_until(len(self._ready), began_ns, self._now_ns)
        return began_ns + self._fixed_ns

    def _step(self) -> None:
        base_ms, call_ms = self._step_ms
        self._now_ns += int((base_ms + call_ms * len(self._ready)) * MS)
        self.num_calls += len(self._ready)
        self.num_steps += 1
        for stream in self._ready:
            self._streams.answered(stream, self._now_ns)
            comes_ns = self._now_ns + int(self._load.think_ms * self._random.uniform(0.5, 1.5) * MS)
            if self._load.main_ms:
                comes_ns = max(comes_ns, self._main_free_ns) + int(self._load.main_ms * MS)
                self._main_free_ns = comes_ns
            heapq.heappush(self._coming, (comes_ns, stream))
        self._ready = []


def share_of_best(load: Load, step_ms: tuple[float, float], ms: float) -> float:
    """Return the share of the best fixed wait's rate that the daemon's own waits get."""

    def rate(seed: int, fixed_ms: float | None) -> float:
        return Machine(load, step_ms, seed, fixed_ms).run(ms)

    best_ms = max(FIXED_MS, key=lambda fixed_ms: rate(1, fixed_ms))
    return rate(2, None) / rate(2, best_ms)
