"""How long the trio thread is held: as long as one task has it, nobody else does.

Every connection, every request of the mount and every batch wait for this thread, so no task may keep it for more than
about a millisecond. A time begins where the task before gave the thread up, or where the thread woke: that takes one
hook for each task and one for each wait. It costs 1.0 us where a task is alone between two waits and 0.8 us where there
are ten, nearly all of it trio's way to a hook; trio itself takes 5 and 2.7 us. A hook before and one after each task
would cost 1.1 and 1.5 us.

Times are those of the clock on the wall: where others have the cores, or the interpreter's lock, that counts, too.
"""

from __future__ import annotations

from bisect import bisect_left
from time import perf_counter
from typing import Any

import trio

FIRST_BOUND_S = 0.000125
BOUNDS_S = tuple(FIRST_BOUND_S * 2**power for power in range(14))
"""Each twice the one before, up to 1.024 s; a millisecond is one of them."""
LONG_S = 0.001
"""What the rule allows."""


class HeldTimes(trio.abc.Instrument):
    """A histogram of the times that tasks held the thread without a break."""

    __slots__ = ("_longer", "_since_s", "longest_s", "num", "total_s")

    def __init__(self) -> None:
        self._since_s = 0.0
        self._longer = [0] * len(BOUNDS_S)
        """Times beyond the first bound, by the next one that they are within; the last are beyond them all."""
        self.num = 0
        self.total_s = 0.0
        self.longest_s = 0.0
        """0 as long as none was beyond the first bound."""

    def install(self) -> None:
        """Measure this run of trio from now on."""
        self._since_s = perf_counter()
        trio.lowlevel.add_instrument(self)

    def after_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - trio's
        self._since_s = perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 - trio's
        now_s = perf_counter()
        held_s = now_s - self._since_s
        self._since_s = now_s
        self.num += 1
        self.total_s += held_s
        if held_s > FIRST_BOUND_S:
            self._longer[bisect_left(BOUNDS_S, held_s) - 1] += 1
            self.longest_s = max(self.longest_s, held_s)

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
        }
