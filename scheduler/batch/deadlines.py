"""Deadlines of calls: one task sleeps until the nearest, and ends the calls that have missed theirs.

A deadline that passes while a call is queued, waits for rows, or is in the run ends the call there and then. The run
looks at the deadlines of its members before each step, too: no step begins with a call that is late.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvfs.alarms import Alarm, Alarms
from scheduler.batch.call import FileCall


class Deadlines:
    """Of the calls in flight. All of it on the trio thread."""

    def __init__(self, expired: Callable[[FileCall], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`expired` is told once of each call that is late; `clock` is the one of `FileCall.deadline_s`."""
        self._expired = expired
        self._clock = clock
        self._alarms = Alarms()
        self._of: dict[FileCall, Alarm] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, call: FileCall) -> None:
        """Watch a call, if it has a deadline, until it is late or `forget`."""
        if call.deadline_s is not None:
            self._of[call] = self._alarms.set(call.deadline_s - self._clock(), lambda: self._miss(call))

    def forget(self, call: FileCall) -> None:
        """It is over. Nothing here refers to it any more: it may hold a megabyte, and its deadline may be far away."""
        alarm = self._of.pop(call, None)
        if alarm is not None:
            self._alarms.cancel(alarm)

    async def run(self) -> None:
        """End calls that are late, for ever."""
        await self._alarms.run()

    def _miss(self, call: FileCall) -> None:
        del self._of[call]
        self._expired(call)
