"""Deadlines of calls: one task sleeps until the nearest deadline, and ends the calls that have missed theirs.

A call that is queued, waits for result slots, or is in the run ends as soon as its deadline has passed. The run checks
the deadlines of its members before each step, too, so no step begins with a late call.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvfs.base.alarms import Alarm, Alarms
from scheduler.batch.call import FileCall


class Deadlines:
    """Deadlines of the calls in flight, on the trio thread."""

    def __init__(self, expired: Callable[[FileCall], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Make an empty set. `expired` gets each late call once. `clock`: the clock of `FileCall.deadline_s`."""
        self._expired = expired
        self._clock = clock
        self._alarms = Alarms()
        self._of: dict[FileCall, Alarm] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, call: FileCall) -> None:
        """Watch the deadline of a call, if it has one, until the call is late or `forget` is called."""
        if call.deadline_s is not None:
            self._of[call] = self._alarms.set(call.deadline_s - self._clock(), lambda: self._miss(call))

    def forget(self, call: FileCall) -> None:
        """Stop watching a call that is over, and drop the reference to it.

        A call may hold a megabyte, and its deadline may be far away.
        """
        alarm = self._of.pop(call, None)
        if alarm is not None:
            self._alarms.cancel(alarm)

    async def run(self) -> None:
        """End late calls until this task is cancelled."""
        await self._alarms.run()

    def _miss(self, call: FileCall) -> None:
        del self._of[call]
        self._expired(call)
