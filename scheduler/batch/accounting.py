"""Accounting of calls and steps, for the daemon, for programs, for their users, and for domains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from kvfs.pages.accounts import Account
from libsym.errors import SymError
from scheduler._loop import lib
from scheduler.batch.call import FileCall
from scheduler.programs.program import Program
from scheduler.programs.used import Used

STEP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Upper bounds of the buckets that count steps by their number of calls. Another bucket counts larger steps."""

TIME_BOUNDS_S = tuple(lib.sym_time_bound_ns(index) / 1e9 for index in range(lib.SYM_NUM_TIMES - 1))
"""Upper bounds of the buckets that count durations, in seconds. Another bucket counts longer durations."""


@dataclass(slots=True)
class Times:
    """Histogram of durations.

    The difference of two readings gives the quantiles of the durations between the readings.
    """

    nums: list[int] = field(default_factory=lambda: [0] * (len(TIME_BOUNDS_S) + 1))
    total_s: float = 0.0


@dataclass(slots=True)
class Statistics:
    """Counters since the daemon started. Times are in seconds."""

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
    """Time that all calls waited: before they joined the run, and for steps while they were in the run."""
    num_steps_by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
    """Steps by the number of their calls: see `STEP_SIZES`."""
    step_times: Times = field(default_factory=Times)
    stretch_times: Times = field(default_factory=Times)
    """Times from the request for a stretch until its end.

    Here a stretch is a call of pred() or a token of generate().
    """
    wait_times: Times = field(default_factory=Times)
    """Parts of the stretch times in which no step held the stretch."""
    num_calls_in_steps: int = 0
    """Calls of each step, summed over the steps: a call in three steps counts three times."""
    num_taken_calls: int = 0
    """Calls of pred() that the run took out of rings, without the gate."""
    num_steps_in_c: int = 0
    """Steps that needed no Python interpreter: all steps on a CPU, no steps on a GPU."""
    num_undecided: int = 0
    """Seats that stayed empty, because a grammar had not decided the next token yet."""
    num_wakes: int = 0
    """Number of times that the run woke the scheduler."""
    num_sleeps: int = 0
    """Number of times that the run slept for want of work."""
    waited_s: float = 0.0
    """Time that steps waited for calls that were due."""


class Accounting:
    """Counters of one scheduler, and the usage that its calls add to programs, users and domains."""

    def __init__(self) -> None:
        self.statistics = Statistics()
        self._domains: WeakKeyDictionary[Account, Used] = WeakKeyDictionary()

    def domains(self) -> dict[int, Used]:
        """Return, by account number, the usage of calls on the files of each domain and of the domains within it."""
        return {account.number: used for account, used in self._domains.items() if not account.core.is_ended}

    def count_call(self, call: FileCall, error: SymError | None) -> None:
        """Count a call that is over."""
        queue_s, failed = call.waited_s, error is not None
        self.statistics.num_calls += 1
        self.statistics.num_failed_calls += failed
        self.statistics.queue_s += queue_s
        for used in self._used_by(call):
            used.calls += 1
            used.failed_calls += failed
            if not failed:
                used.tokens_in += call.num_given
                used.tokens_out += call.num_answered
            used.rejected_tokens += call.num_rejected
            used.queue_s += queue_s

    def count_used(self, program: Program, account: Account, used: Any) -> None:
        """Count calls that the core began for a program. `used`: a `sym_usage`."""
        self.statistics.num_calls += used.calls
        self.statistics.queue_s += used.queue_ns * 1e-9
        for each in self._users(program, account):
            each.calls += used.calls
            each.tokens += used.tokens
            each.tokens_in += used.tokens_in
            each.tokens_out += used.calls
            each.steps += used.steps
            each.compute_s += used.compute_ns * 1e-9
            each.queue_s += used.queue_ns * 1e-9

    def _used_by(self, call: FileCall) -> tuple[Used, ...]:
        if not call.counted:
            table = call.file.table
            call.counted = self._users(call.caller.program, table.pool.accounts.of(table.owner))
        return call.counted

    def _users(self, program: Program, account: Account) -> tuple[Used, ...]:
        """Return the usages of a program, of its user, and of the domains around a file of `account`.

        The pages of the file may belong to another user: computation counts to the program's own user.
        """
        domains = [each for each in account.chain() if each.is_domain]
        return program.used, program.user, *[self._domains.setdefault(each, Used()) for each in domains]

    def count_steps(self, counts: Any, *, in_c: bool) -> None:
        """Copy the run's counters. `counts`: a `sym_counts`. `in_c`: the run's steps need no interpreter."""
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
        numbers.step_times = _times(counts.steps)
        numbers.stretch_times, numbers.wait_times = _times(counts.stretches), _times(counts.waits)
        numbers.num_calls_in_steps = counts.num_calls_in_steps
        numbers.num_taken_calls = counts.num_taken
        numbers.num_undecided = counts.num_undecided
        numbers.num_wakes = counts.num_wakes
        numbers.num_sleeps = counts.num_sleeps
        numbers.waited_s = counts.waited_ns * 1e-9

    def count_member(self, call: FileCall, before: Any, now: Any) -> None:
        """Count the work of a member since the last count. A generation counts as one call, at its end.

        `before`: the `sym_news` of the last count. The function sets `before` to `now`.
        """
        more_s, waited_s = (now.compute_ns - before.compute_ns) * 1e-9, (now.queue_ns - before.queue_ns) * 1e-9
        num_entries, num_calls = now.num_done - before.num_done, now.num_calls - before.num_calls
        num_steps, num_rows = now.num_steps - before.num_steps, now.num_rows_computed - before.num_rows_computed
        is_first = not before.num_calls
        before[0] = now
        call.promise(max(0, call.num_promised - num_rows))
        for used in call.counted or self._used_by(call):
            used.tokens += num_rows
            used.steps += num_steps
            used.compute_s += more_s
        if now.num_calls == 0:
            call.compute_s += more_s
            call.queue_s += waited_s
            call.num_appended += num_entries
        else:
            if is_first:
                waited_s += call.waited_s
            self.statistics.num_calls += num_calls
            self.statistics.queue_s += waited_s
            for used in call.counted:
                used.calls += num_calls
                used.tokens_in += num_entries
                used.tokens_out += num_calls
                used.queue_s += waited_s


def _times(times: Any) -> Times:
    return Times(list(times.num), times.sum_ns * 1e-9)
