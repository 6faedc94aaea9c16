"""Times that tasks hold the trio thread. While one task has the thread, no other task runs.

Every connection, every request of the mount and every batch wait for this thread. So no task may keep it for more than
about a millisecond. A time begins when the previous task gave the thread up, or when the thread woke. So one hook for
each task and one for each wait are enough. These hooks cost 1.0 us a task if one task runs between two waits, and 0.8
us a task if ten tasks run. Nearly all of this cost is trio's call of the hook. In the same two cases, trio itself takes
5 us and 2.7 us, and two hooks for each task (before and after it) would cost 1.1 us and 1.5 us.

Times are wall time, and also grow while another thread has the core or the interpreter's lock. So each of the longest
times is reported with its CPU time and its task. Reading the thread's CPU clock takes 1 us. So the clock is read at
most once a millisecond, and after each long time. Therefore a CPU time includes at most a millisecond of earlier tasks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass
from heapq import heappush, heappushpop, nlargest
from time import perf_counter, thread_time
from typing import Any

import trio

FIRST_BOUND_S = 0.000125
BOUNDS_S = tuple(FIRST_BOUND_S * 2**power for power in range(14))
"""Bounds of the histogram. Each is twice the previous bound, up to 1.024 s. One bound is a millisecond."""
LONG_S = 0.001
"""Longest time that a task may hold the thread."""
NUM_WORST = 10


@dataclass(frozen=True, order=True, slots=True)
class Held:
    """A long time that one task held the thread."""

    held_s: float
    processor_s: float
    task: str
    """The task's function, and the line at which it gave the thread up, if it has not ended."""


class HeldTimes(trio.abc.Instrument):
    """Histogram of the times that tasks held the thread without a break."""

    __slots__ = ("_longer", "_processor_s", "_read_s", "_since_s", "_worst", "longest_s", "num", "total_s")

    def __init__(self) -> None:
        self._since_s = 0.0
        self._read_s = self._processor_s = 0.0
        """Wall time at which the thread's CPU clock was last read, and the CPU time then."""
        self._worst: list[Held] = []
        """Heap of the longest times."""
        self._longer = [0] * len(BOUNDS_S)
        """Counts of times beyond the first bound.

        A time counts for the smallest bound above it; the last count is for longer times.
        """
        self.num = 0
        self.total_s = 0.0
        self.longest_s = 0.0
        """Longest time; 0 while no time is beyond the first bound."""

    def install(self) -> None:
        """Measure this run of trio from now on."""
        self._since_s = self._read_s = perf_counter()
        self._processor_s = thread_time()
        trio.lowlevel.add_instrument(self)

    def after_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - trio's
        self._since_s = now_s = perf_counter()
        if now_s - self._read_s > LONG_S:
            self._read_s, self._processor_s = now_s, thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        now_s = perf_counter()
        held_s = now_s - self._since_s
        self._since_s = now_s
        self.num += 1
        self.total_s += held_s
        if held_s > FIRST_BOUND_S:
            self._longer[bisect_left(BOUNDS_S, held_s) - 1] += 1
            self.longest_s = max(self.longest_s, held_s)
            if held_s > LONG_S:
                self._note(task, held_s, now_s)

    def _note(self, task: trio.lowlevel.Task, held_s: float, now_s: float) -> None:
        processor_s = thread_time()
        if len(self._worst) < NUM_WORST or held_s > self._worst[0].held_s:
            found = Held(held_s, min(held_s, processor_s - self._processor_s), _name(task))
            (heappush if len(self._worst) < NUM_WORST else heappushpop)(self._worst, found)
        self._read_s, self._processor_s = now_s, processor_s

    @property
    def nums(self) -> list[int]:
        """Return the counts of the histogram's buckets. The last bucket has the times beyond the last bound."""
        return [self.num - sum(self._longer), *self._longer]

    def info(self) -> dict[str, Any]:
        """Return the figures for `symphony stat`."""
        nums = self.nums
        return {
            "num": self.num,
            "num_long": sum(nums[bisect_left(BOUNDS_S, LONG_S) + 1 :]),
            "long_s": LONG_S,
            "longest_s": round(self.longest_s, 6),
            "total_s": round(self.total_s, 6),
            "bounds_s": BOUNDS_S,
            "nums": nums,
            "worst": [asdict(each) for each in nlargest(NUM_WORST, self._worst)],
        }


def _name(task: trio.lowlevel.Task) -> str:
    coroutine: Any = task.coro
    place = ""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None and not (module := str(frame.f_globals["__name__"])).startswith("trio."):
            place = f" {module}:{frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None)
    return f"{task.name}{place}"
