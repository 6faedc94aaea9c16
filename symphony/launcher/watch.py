"""The limits that the launcher sees to: time and processes, and memory where no cgroup does.

Memory is looked at rarely while the program is far from its limit, and each LEAST_S when it is near. Between two looks
a process may grow. If the limit was asked for, a wall for its data, far beyond, gives it a MemoryError there. The wall
counts what is reserved, not what is used (a thread's stack is 8 MiB), so it would be wrong as the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from symphony.launcher import processes
from symphony.launcher.ending import members
from symphony.launcher.machine import Machine
from symphony.launcher.program import Program

LEAST_S, MOST_S = 0.1, 2.0
"""Between two looks."""
_NEAR_S = 0.5
"""What the machine has given to all says nothing of a limit that one process could reach so soon."""
_BYTES_PER_S = 4e9
"""No process gets memory faster: the kernel zeroes it."""
WALL_TIMES, WALL_MORE = 2, 256 << 20


def wall_bytes(memory: int) -> int:
    """What RLIMIT_DATA is for processes of a program that may have `memory`."""
    return WALL_TIMES * memory + WALL_MORE


def pause_s(used: int, limit: int) -> float:
    """How long nobody has to look at a program that uses so many bytes; 0: it has run into its limit."""
    return 0 if used > limit else min(max((limit - used) / _BYTES_PER_S, LEAST_S), MOST_S)


class Watch:
    """Looks until it is stopped, or the program has run into a limit."""

    def __init__(self, program: Program, on_limit: Callable[[Program, str], None], machine: Machine) -> None:
        self._program = program
        self._on_limit = on_limit
        self._machine = machine
        self._loop = asyncio.get_running_loop()
        limits, group = program.spec.limits, program.group
        self._until_s = None if limits.time is None else self._loop.time() + limits.time
        self._memory = None if group is not None and group.limits_memory else program.spec.memory
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        left_s = {"time": self._time(), "processes": self._processes(), "memory": self._memory_bytes()}
        pauses_s = {kind: pause_s for kind, pause_s in left_s.items() if pause_s is not None}
        for kind, pause_s in pauses_s.items():
            if pause_s <= 0:
                self._on_limit(self._program, kind)
                return
        if pauses_s:
            self._timer = self._loop.call_at(self._next_s(min(pauses_s.values())), self._look)

    def _next_s(self, pause_s: float) -> float:
        """When the pause is over at the latest. Looks at all programs come together, so that they cost one wake."""
        now_s = self._loop.time()
        if pause_s < LEAST_S:
            return now_s + pause_s
        return max((now_s + pause_s) // LEAST_S * LEAST_S, now_s + LEAST_S / 2)

    # Seconds until the next look; none are left where it has run into the limit, and None: there is no limit.

    def _time(self) -> float | None:
        return None if self._until_s is None else self._until_s - self._loop.time()

    def _processes(self) -> float | None:
        limit, group = self._program.spec.limits.processes, self._program.group
        if limit is None:
            return None
        tasks = None if group is None else group.num_tasks()
        if tasks is not None and tasks <= limit:
            return LEAST_S
        return 0 if len(members(self._program)) > limit else LEAST_S

    def _memory_bytes(self) -> float | None:
        limit = self._memory
        if limit is None:
            return None
        used = self._machine.memory_bytes()
        if used + _NEAR_S * _BYTES_PER_S > limit:
            used = processes.memory_bytes(members(self._program), limit)
        return pause_s(used, limit)
