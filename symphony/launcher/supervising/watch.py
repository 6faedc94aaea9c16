"""Enforcement of limits by the launcher: time, processes, and (without a cgroup) memory.

Memory is checked rarely while the program is far from its limit, and every LEAST_S near it. Between two checks a
process may grow. So if the user asked for the limit, RLIMIT_DATA is set far above the limit. A process that reaches
RLIMIT_DATA gets a MemoryError. RLIMIT_DATA counts reserved memory instead of used memory (a thread's stack is 8 MiB),
so it can't serve as the limit itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from symphony.launcher.machine import processes
from symphony.launcher.machine.machine import MachineMemory
from symphony.launcher.supervising.ending import members
from symphony.launcher.supervising.program import LaunchedProgram

LEAST_S, MOST_S = 0.1, 2.0
"""Shortest and longest time between two checks."""
_NEAR_S = 0.5
"""Margin below the memory limit, in seconds of fastest growth.
The program's own memory is counted only if the machine's total memory use plus this margin exceeds the program's limit.
"""
_BYTES_PER_S = 4e9
"""Fastest growth of a process. The kernel must zero its memory, which limits the rate."""
WALL_TIMES, WALL_MORE = 2, 256 << 20


def wall_bytes(memory: int) -> int:
    """Return the RLIMIT_DATA of a program with the memory limit `memory`."""
    return WALL_TIMES * memory + WALL_MORE


def pause_s(used: int, limit: int) -> float:
    """Return the time until the next check of a program that uses `used` bytes. 0: the program exceeds its limit."""
    return 0 if used > limit else min(max((limit - used) / _BYTES_PER_S, LEAST_S), MOST_S)


class Watch:
    """Periodic check of one program, until the check is stopped, or the program exceeds a limit."""

    def __init__(
        self, program: LaunchedProgram, on_limit: Callable[[LaunchedProgram, str], None], machine: MachineMemory
    ) -> None:
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
        """Return the time of the next check.
        Times are rounded down, so that the checks of all programs share wakeups.
        """
        now_s = self._loop.time()
        if pause_s < LEAST_S:
            return now_s + pause_s
        return max((now_s + pause_s) // LEAST_S * LEAST_S, now_s + LEAST_S / 2)

    # These methods return the seconds until the next check. 0 or less: the limit is exceeded. None: there is no limit.

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
