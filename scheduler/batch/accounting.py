"""Costs of calls and steps: counted for the daemon, for programs, for their users, and for domains."""

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
"""Steps are counted by how many calls they hold: up to the first of these, up to the second, …, or more."""

TIME_BOUNDS_S = tuple(lib.sym_time_bound_ns(index) / 1e9 for index in range(lib.SYM_NUM_TIMES - 1))
"""Of what is counted by how long it took: up to the first of these, up to the second, …, or longer."""


@dataclass(slots=True)
class Times:
    """Numbers of calls by the time that they took; the difference of two has the quantiles of a stretch of time."""

    nums: list[int] = field(default_factory=lambda: [0] * (len(TIME_BOUNDS_S) + 1))
    total_s: float = 0.0


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
    """Time that calls waited for steps, summed; before they were in the run, too."""
    num_steps_by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
    """Steps by the number of their calls, see `STEP_SIZES`."""
    step_times: Times = field(default_factory=Times)
    stretch_times: Times = field(default_factory=Times)
    """From when a stretch, a call of pred() or a token of generate(), was asked for until it was computed."""
    wait_times: Times = field(default_factory=Times)
    """Time of that in which it was in no step."""
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


class Accounting:
    """Keeps the numbers of one scheduler, and counts what calls use to their programs, users and domains."""

    def __init__(self) -> None:
        self.statistics = Statistics()
        self._domains: WeakKeyDictionary[Account, Used] = WeakKeyDictionary()

    def domains(self) -> dict[int, Used]:
        """Return the usage of calls on the files of each domain, those of domains within it included."""
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
        """Count calls of a program that the core has begun, each for one token: a `sym_usage`."""
        self.statistics.num_calls += used.calls
        self.statistics.queue_s += used.queue_ns * 1e-9
        for each in self._users(program, account):
            each.calls += used.calls
            each.tokens += used.tokens
            each.tokens_in += used.calls
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
        """Return the usages of a program, its user, and the domains around a file. Whose file that is does not matter
        for the first two: who computes is not always who pays for the pages.
        """
        domains = [each for each in account.chain() if each.is_domain]
        return program.used, program.user, *[self._domains.setdefault(each, Used()) for each in domains]

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
        numbers.step_times = _times(counts.steps)
        numbers.stretch_times, numbers.wait_times = _times(counts.stretches), _times(counts.waits)
        numbers.num_calls_in_steps = counts.num_calls_in_steps
        numbers.num_taken_calls = counts.num_taken
        numbers.num_undecided = counts.num_undecided
        numbers.num_wakes = counts.num_wakes
        numbers.num_sleeps = counts.num_sleeps
        numbers.waited_s = counts.waited_ns * 1e-9

    def count_member(self, call: FileCall, before: Any, now: Any) -> None:
        """Note what the calls of a program used; a generation counts as one call, at its end. `before`: the `sym_news`
        of its member that are counted, and then those of `now`.
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
                used.tokens_in += num_calls
                used.tokens_out += num_calls
                used.queue_s += waited_s


def _times(times: Any) -> Times:
    return Times(list(times.num), times.sum_ns * 1e-9)
