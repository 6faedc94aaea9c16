"""Programs that are about to come back with calls that the run does not see: those that come by the gate.

The run waits for them as for those whose rings it looks at, in `loop.c` alone; here it is counted who they are. A LIP's
think time (from an answer to its next call) is measured: one that usually comes back within the wait is expected.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.batch.call import Caller

THINK_WEIGHT = 0.2
"""Weight of the newest sample in a LIP's average think time."""
MAX_REMEMBERED_ANSWERS = 256
"""Of one LIP. Bounds what threads that have ended leave behind."""


class Waiting(Protocol):
    """What waits: the run."""

    def patience(self) -> tuple[float, int]:
        """How long at most, in seconds; how often in vain so far."""
        ...

    def expect(self, more: int) -> None:
        """So many more programs are about to come, or fewer."""
        ...


@dataclass(slots=True)
class _Returning:
    """How soon a LIP comes back with its next call; one with several threads has several calls to come back with."""

    think_s: float = 0.0
    answered_s: list[float] = field(default_factory=list)
    """When the calls were answered that no new call has followed yet, oldest first. A thread that has ended leaves its
    time here, until it has been waited for in vain: so a new call counts as the return of the newest."""
    num_expected: int = 0


class Returning:
    """All of it on the trio thread."""

    def __init__(self, run: Waiting) -> None:
        self._run = run
        self._records: dict[Caller, _Returning] = {}
        self._expected: set[Caller] = set()
        self._num_misses = 0

    def note_answer(self, caller: Caller) -> None:
        record = self._records.setdefault(caller, _Returning())
        record.answered_s.append(time.monotonic())
        del record.answered_s[:-MAX_REMEMBERED_ANSWERS]
        if record.think_s < self._patience_s():
            record.num_expected += 1
            self._expected.add(caller)
            self._run.expect(1)

    def note_call(self, caller: Caller) -> None:
        record = self._records.get(caller)
        self._patience_s()
        if record is None or not record.answered_s:
            return
        think_s = time.monotonic() - record.answered_s.pop()
        record.think_s += THINK_WEIGHT * (think_s - record.think_s)
        if record.num_expected:
            record.num_expected -= 1
            self._run.expect(-1)
            if not record.num_expected:
                self._expected.discard(caller)

    def forget(self, caller: Caller) -> None:
        """It has gone."""
        record = self._records.pop(caller, None)
        if record is not None and record.num_expected:
            self._expected.discard(caller)
            self._run.expect(-record.num_expected)

    def _patience_s(self) -> float:
        """How long the run waits. Those that it waited for in vain think longer than they used to."""
        patience_s, num_misses = self._run.patience()
        if num_misses != self._num_misses:
            self._num_misses = num_misses
            now_s = time.monotonic()
            for caller in self._expected:
                record = self._records[caller]
                record.think_s = max(now_s - record.answered_s[-1] if record.answered_s else 0.0, patience_s)
                record.answered_s.clear()
                record.num_expected = 0
            self._expected.clear()
        return patience_s
