"""What calls and steps cost: counted for the daemon, and for each caller."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from libsym.errors import SymError
from scheduler.batch.call import Caller, FileCall

STEP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Steps are counted by how many calls they hold: up to the first of these, up to the second, …, or more."""


@dataclass(slots=True)
class Statistics:
    """Counters since the daemon started; times in seconds."""

    num_steps: int = 0
    num_calls: int = 0
    num_failed_calls: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    max_calls_in_step: int = 0
    max_lips_in_step: int = 0
    step_s: float = 0.0
    last_step_s: float = 0.0
    queue_s: float = 0.0
    """Time that answered calls were not in a step, summed."""
    num_steps_by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
    """Steps by the number of their calls, see `STEP_SIZES`."""
    num_calls_in_steps: int = 0
    """Summed over steps: a call that took three of them counts three times."""
    num_taken_calls: int = 0
    """Calls of pred() that runs took without the gate."""
    num_steps_in_c: int = 0
    """Steps that took no interpreter: all, or on a GPU none."""
    num_undecided: int = 0
    """Seats that stayed empty, for it was not decided yet what may be drawn."""
    num_wakes: int = 0
    """Times that the run woke the scheduler."""
    num_sleeps: int = 0
    """Times that it slept for want of work."""
    waited_s: float = 0.0
    """Time that it waited for programs that were about to return."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one caller has used; times in seconds."""

    num_calls: int = 0
    num_failed_calls: int = 0
    num_tokens: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    num_rejected: int = 0
    """Of the tokens, those of drafts that turned out wrong: they are in no file."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.num_calls + other.num_calls,
            self.num_failed_calls + other.num_failed_calls,
            self.num_tokens + other.num_tokens,
            self.queue_s + other.queue_s,
            self.compute_s + other.compute_s,
            self.num_rejected + other.num_rejected,
        )


_NOTHING = Usage()


class Accounting:
    """Keeps the numbers of one scheduler."""

    def __init__(self) -> None:
        self.statistics = Statistics()
        self._usage: dict[Caller, Usage] = {}

    def usage_of(self, caller: Caller) -> Usage:
        return self._usage.get(caller, _NOTHING)

    def forget(self, caller: Caller) -> None:
        """It has gone."""
        self._usage.pop(caller, None)

    def count_call(self, call: FileCall, error: SymError | None) -> None:
        """It is over. What nobody waits for any more counts for the daemon alone."""
        queue_s = time.monotonic() - call.submitted_s - call.compute_s
        self.statistics.num_calls += 1
        self.statistics.num_failed_calls += error is not None
        self.statistics.queue_s += queue_s
        if not call.is_dropped:
            num_computed = call.num_appended + call.num_rejected
            used = Usage(1, int(error is not None), num_computed, queue_s, call.compute_s, call.num_rejected)
            self._usage[call.caller] = self.usage_of(call.caller) + used

    def count_steps(self, counts: Any, *, in_c: bool) -> None:
        """`sym_counts` of the run."""
        numbers = self.statistics
        numbers.num_steps = counts.num_steps
        numbers.num_steps_in_c = counts.num_steps if in_c else 0
        numbers.num_tokens = counts.num_tokens
        numbers.num_prefill_tokens = counts.num_prefill_tokens
        numbers.max_calls_in_step = counts.max_calls
        numbers.max_lips_in_step = counts.max_programs
        numbers.step_s = counts.step_ns * 1e-9
        numbers.last_step_s = counts.last_step_ns * 1e-9
        numbers.num_steps_by_size = list(counts.sizes)
        numbers.num_calls_in_steps = counts.num_calls_in_steps
        numbers.num_taken_calls = counts.num_taken
        numbers.num_undecided = counts.num_undecided
        numbers.num_wakes = counts.num_wakes
        numbers.num_sleeps = counts.num_sleeps
        numbers.waited_s = counts.waited_ns * 1e-9

    def count_member(self, member: Counted, now: Any) -> None:
        """Note what the calls of a program used; a generation counts as one call, at its end. `now`: `sym_news`."""
        compute_s = now.compute_ns * 1e-9
        num_entries = now.num_done - member.num_counted_entries
        member.num_counted_entries = now.num_done
        call = member.call
        if now.num_calls == 0:
            call.compute_s += compute_s - member.compute_s
            call.num_appended += num_entries
        else:
            num_calls = now.num_calls - member.num_counted
            member.num_counted += num_calls
            self.statistics.num_calls += num_calls
            if not call.is_dropped:
                used = Usage(num_calls, 0, num_entries, 0.0, compute_s - member.compute_s)
                self._usage[call.caller] = self.usage_of(call.caller) + used
        member.compute_s = compute_s


class Counted(Protocol):
    """A member of the run, and how much of it is counted."""

    call: FileCall
    num_counted: int
    num_counted_entries: int
    compute_s: float
