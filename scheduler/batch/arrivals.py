"""When to launch a step: at once, unless callers of the last one are about to return.

A LIP's think time (from an answer to its next call) is measured. Those that usually come back within a tenth of a step
are waited for, that long at most, so that the batch does not fall apart into two half-empty ones that take turns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import trio

from scheduler.batch.call import Caller

LAUNCH_WAIT_SHARE = 0.1
"""Share of a step's time that a launch may wait for callers that are about to return."""
LAUNCH_WAIT_MIN_S = 0.001
"""Shorter waits are not worth a timer: the kernel's poll rounds up to a millisecond."""
THINK_WEIGHT = 0.2
"""Weight of the newest sample in a LIP's average think time."""
MAX_REMEMBERED_ANSWERS = 256
"""Of one LIP: as many calls as a step holds. Bounds what threads that have ended leave behind."""


@dataclass(slots=True)
class _Returning:
    """How soon a LIP comes back with its next call; one with several threads has several calls to come back with."""

    think_s: float = 0.0
    answered_s: list[float] = field(default_factory=list)
    """When the calls were answered that no new call has followed yet, oldest first. A thread that has ended leaves its
    time here, until it has been waited for in vain: so a new call counts as the return of the newest."""

    def note_answer(self) -> None:
        self.answered_s.append(time.perf_counter())
        del self.answered_s[:-MAX_REMEMBERED_ANSWERS]

    def note_call(self) -> None:
        if self.answered_s:
            think_s = time.perf_counter() - self.answered_s.pop()
            self.think_s += THINK_WEIGHT * (think_s - self.think_s)

    def note_miss(self) -> None:
        """It was waited for in vain: it is thinking longer than it used to."""
        self.think_s = time.perf_counter() - self.answered_s[-1]
        self.answered_s.clear()


class Arrivals:
    """Who has come with a call, and who is about to."""

    def __init__(self) -> None:
        self._returning: dict[Caller, _Returning] = {}
        self._event = trio.Event()

    def note(self) -> None:
        """A call is ready."""
        self._event.set()

    def note_call(self, caller: Caller) -> None:
        record = self._returning.get(caller)
        if record is not None:
            record.note_call()
            self._event.set()

    def note_answer(self, caller: Caller) -> None:
        self._returning.setdefault(caller, _Returning()).note_answer()

    def forget(self, caller: Caller) -> None:
        """It has gone."""
        self._returning.pop(caller, None)

    async def wait(self) -> None:
        """For the next."""
        self._event = trio.Event()
        await self._event.wait()

    async def wait_for_returning(self, last_step_s: float) -> None:
        """For those that were answered with the last step and usually come back soon."""
        wait_s = last_step_s * LAUNCH_WAIT_SHARE
        if wait_s < LAUNCH_WAIT_MIN_S:
            return
        with trio.move_on_after(wait_s) as scope:
            while self._expected(wait_s):
                await self.wait()
        if scope.cancelled_caught:
            for record in self._expected(wait_s):
                record.note_miss()

    def _expected(self, wait_s: float) -> list[_Returning]:
        return [record for record in self._returning.values() if record.answered_s and record.think_s < wait_s]
