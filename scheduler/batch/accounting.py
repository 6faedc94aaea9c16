"""What calls and steps cost: counted for the daemon, and for each caller."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from libsym.errors import SymError
from scheduler.batch.call import Caller, FileCall
from scheduler.batch.run import Member, Run

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

    def count_size(self, num_calls: int, num_steps: int) -> None:
        """So many steps held so many calls."""
        self.max_calls_in_step = max(self.max_calls_in_step, num_calls)
        self.num_steps_by_size[bisect_left(STEP_SIZES, num_calls)] += num_steps
        self.num_calls_in_steps += num_calls * num_steps


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

    def count_step(self, plan: Sequence[tuple[FileCall, int]], step_s: float) -> None:
        numbers = self.statistics
        numbers.num_steps += 1
        numbers.step_s += step_s
        numbers.last_step_s = step_s
        numbers.num_tokens += sum(num_now for _, num_now in plan)
        numbers.num_prefill_tokens += sum(num_now for call, num_now in plan if len(call.tokens) > 1)
        numbers.max_lips_in_step = max(numbers.max_lips_in_step, len({call.caller.pid for call, _ in plan}))
        numbers.count_size(len(plan), 1)
        for call, _ in plan:
            call.compute_s += step_s

    def count_call(self, call: FileCall, error: SymError | None) -> None:
        """It is over. What nobody waits for any more counts for the daemon alone."""
        queue_s = time.perf_counter() - call.submitted_s - call.compute_s
        self.statistics.num_calls += 1
        self.statistics.num_failed_calls += error is not None
        self.statistics.queue_s += queue_s
        if not call.is_dropped:
            num_computed = call.num_appended + call.num_rejected
            used = Usage(1, int(error is not None), num_computed, queue_s, call.compute_s, call.num_rejected)
            self._usage[call.caller] = self.usage_of(call.caller) + used

    def count_run(self, run: Run) -> None:
        """What it has done since it was counted last."""
        counts, numbers = run.count(), self.statistics
        numbers.num_steps += counts.num_steps
        numbers.step_s += counts.step_s
        numbers.last_step_s = counts.last_step_s
        numbers.num_taken_calls += counts.num_taken
        callers = {member.call.caller.pid for member in run.members}
        numbers.max_lips_in_step = max(numbers.max_lips_in_step, len(callers))
        for member in run.members:
            self._count_member(member)

    def _count_member(self, member: Member) -> None:
        """Note what the calls of a program used; a generation counts as one call, at its end."""
        compute_s = member.compute_ns * 1e-9
        num_entries = member.num_committed - member.num_counted_entries
        member.num_counted_entries = member.num_committed
        self.statistics.num_tokens += num_entries
        if member.hot is None:
            member.call.compute_s += compute_s - member.compute_s
            member.call.num_appended += num_entries
        elif not member.call.is_dropped:
            num_calls = member.num_calls - member.num_counted
            used = Usage(num_calls, 0, num_entries, 0.0, compute_s - member.compute_s)
            self._usage[member.call.caller] = self.usage_of(member.call.caller) + used
            self.statistics.num_calls += num_calls
            member.num_counted += num_calls
        member.compute_s = compute_s
