"""Alarms: functions that are called at given times. One task sleeps until the next alarm, then calls its function.

The daemon's trio thread owns the alarms. An alarm's own action may call `set` and `cancel`.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable
from itertools import count

import trio

log = logging.getLogger(__name__)

ACTIONS_A_TURN = 16
"""The most alarms that go off before other tasks run. An action may take some tens of microseconds."""
MIN_CANCELLED = 64
"""Cancelled alarms are removed from the heap when there are at least this many, and more of them than live alarms."""


class Alarm:
    """An action to call at a given time."""

    __slots__ = ("action", "due_s", "order")

    def __init__(self, due_s: float, order: int, action: Callable[[], None]) -> None:
        self.due_s = due_s
        self.order = order
        self.action: Callable[[], None] | None = action
        """The function to call. None: the alarm has gone off, or was cancelled."""

    def __lt__(self, other: Alarm) -> bool:
        return (self.due_s, self.order) < (other.due_s, other.order)


class Alarms:
    """The set of pending alarms. `run` is the task that serves them."""

    def __init__(self) -> None:
        self._heap: list[Alarm] = []
        self._num_cancelled = 0
        self._numbers = count()
        self._earlier = trio.Event()

    def __len__(self) -> int:
        """Return the number of alarms that will go off."""
        return len(self._heap) - self._num_cancelled

    def set(self, delay_s: float, action: Callable[[], None]) -> Alarm:
        """Call `action` in `delay_s` seconds. The action must not await."""
        alarm = Alarm(trio.current_time() + delay_s, next(self._numbers), action)
        heapq.heappush(self._heap, alarm)
        if self._heap[0] is alarm:
            self._earlier.set()
        return alarm

    def cancel(self, alarm: Alarm) -> None:
        """Cancel an alarm. If the alarm has gone off, do nothing."""
        if alarm.action is None:
            return
        alarm.action = None
        self._num_cancelled += 1
        if self._num_cancelled >= MIN_CANCELLED and 2 * self._num_cancelled > len(self._heap):
            self._heap = [each for each in self._heap if each.action is not None]
            heapq.heapify(self._heap)
            self._num_cancelled = 0

    async def run(self) -> None:
        """Call the actions of alarms as they come due, for ever."""
        while True:
            self._earlier = trio.Event()
            for _ in range(ACTIONS_A_TURN):
                if not self._heap or self._heap[0].due_s > trio.current_time():
                    break
                self._go_off(heapq.heappop(self._heap))
            else:
                await trio.lowlevel.checkpoint()
                continue
            with trio.move_on_at(self._heap[0].due_s if self._heap else math.inf):
                await self._earlier.wait()

    def _go_off(self, alarm: Alarm) -> None:
        action, alarm.action = alarm.action, None
        if action is None:
            self._num_cancelled -= 1
            return
        try:
            action()
        except Exception:
            log.exception("an alarm's action failed")
