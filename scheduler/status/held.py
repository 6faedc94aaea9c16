"""How long the trio thread is held: as long as one task has it, nobody else does.

Every connection, every request of the mount and every batch wait for this thread, so no task may keep it for more than
about a millisecond. A time begins where the task before gave the thread up, or where the thread woke: that takes one
hook for each task and one for each wait. It costs 1.0 us where a task is alone between two waits and 0.8 us where there
are ten, nearly all of it trio's way to a hook; trio itself takes 5 and 2.7 us. A hook before and one after each task
would cost 1.1 and 1.5 us.

Times are those of the clock on the wall: where others have the cores, or the interpreter's lock, that counts, too. So
the longest ones are told with the processor's time beside, and with the task. The thread's own clock takes 1 us to
read: it is read at most once a millisecond, and behind each long time, so a processor's time has at most a millisecond
of what other tasks did before.
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
"""Each twice the one before, up to 1.024 s; a millisecond is one of them."""
LONG_S = 0.001
"""What the rule allows."""
NUM_WORST = 10


@dataclass(frozen=True, order=True, slots=True)
class Held:
    """A long time."""

    held_s: float
    processor_s: float
    task: str
    """The task's function, and the line at which it gave the thread up, where it has not ended."""


class HeldTimes(trio.abc.Instrument):
    """A histogram of the times that tasks held the thread without a break."""

    __slots__ = ("_longer", "_processor_s", "_read_s", "_since_s", "_worst", "longest_s", "num", "total_s")

    def __init__(self) -> None:
        self._since_s = 0.0
        self._read_s = self._processor_s = 0.0
        """When the thread's own clock was read last, and what it said."""
        self._worst: list[Held] = []
        """A heap."""
        self._longer = [0] * len(BOUNDS_S)
        """Times beyond the first bound, by the next one that they are within; the last are beyond them all."""
        self.num = 0
        self.total_s = 0.0
        self.longest_s = 0.0
        """0 as long as none was beyond the first bound."""

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
        """How many times were within each bound and beyond the one before; then those beyond the last."""
        return [self.num - sum(self._longer), *self._longer]

    def info(self) -> dict[str, Any]:
        """For `symphony stat`."""
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
