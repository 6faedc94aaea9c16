"""A loop of steps on trio's clock, without a model: the policy plans, and a step sleeps for what it costs."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import trio
import trio.testing

from scheduler._loop import ffi, lib
from scheduler.batch.policy import CANDIDATE, NO_DEADLINE, Policy, StepLimits, new_shares

SECOND = 1_000_000_000
AGING_PER_S, PATIENCE_S, OVERDUE, BESIDE, EAGER, LONGEST, TOGETHER = 20, 5, 16, 1.75, 16, 7.5, 25
LASTS, MOST_LONG, PAUSE, HOLD, WORTH, THINKING = 500, 4, 50, 4, 8, 8
"""Constants of `policy.c`."""


@dataclass(frozen=True)
class Account:
    user: int
    share: int
    weight: float
    plans_for_a_place: float
    """The bound."""


@dataclass(eq=False)
class Call:
    account: Account
    share: int
    left: int
    length: int = 0
    priority: int = 0
    deadline_ns: int = NO_DEADLINE
    is_digested: bool = False
    since_ns: int = 0
    begun_ns: int = 0
    is_late: bool = False
    """Whether the call's deadline passed before it was complete."""
    done: trio.Event = field(default_factory=trio.Event)
    highest: int = -(1 << 31)
    """Priority in its account while it waits."""
    latest_plan: float = math.inf
    """Number of the plan by which the call has a place. It is known once no later call can go before this one."""


def plans_for_a_place(weights: list[float], weight: float, of_parent: float) -> float:
    """Return the plans until a place, as `policy.c` states: for a sibling among `weights` whose parent has a place in
    `of_parent` plans.
    """
    return of_parent if len(weights) == 1 else OVERDUE * sum(weights) / weight + len(weights) * of_parent


class Tree:
    """Users, their accounts, and programs in these."""

    def __init__(self, weights_by_user: list[list[float]], user_weights: list[float] | None = None) -> None:
        user_weights = user_weights or [1.0] * len(weights_by_user)
        self._parents, self._weights = [-1], [1.0]
        self.accounts: list[Account] = []
        for user, weights in enumerate(weights_by_user):
            of_user = plans_for_a_place(user_weights, user_weights[user], 1)
            user_share = self._add(0, user_weights[user])
            for weight in weights:
                bound = plans_for_a_place(weights, weight, of_user)
                self.accounts.append(Account(user, self._add(user_share, weight), weight, bound))

    def new_program(self, account: Account) -> int:
        return self._add(account.share, 1.0)

    def shares(self):
        return new_shares(self._parents, self._weights)

    def _add(self, parent: int, weight: float) -> int:
        self._parents.append(parent)
        self._weights.append(weight)
        return len(self._parents) - 1


class Machine:
    """The loop of steps: plans, computes, settles; and checks what every plan promises."""

    def __init__(self, tree: Tree, limits: StepLimits, row_ms: float, base_ms: float = 0.0) -> None:
        self.limits = limits
        self.cost = ffi.new("sym_cost *")
        self.cost.rows_ns = [(base_ms + row_ms * 2**knot) * 1e6 for knot in range(len(self.cost.rows_ns))]
        self.cost.pair_ns = self.cost.entry_ns = row_ms * 100  # a thousand entries are a tenth of a row
        self._work = ffi.new("sym_work *")
        self._policy, self._shares = Policy(limits, self.cost), tree.shares()
        self.calls: list[Call] = []
        self._has_calls = trio.Event()
        self.num_plans = self.num_held = 0
        self._decoded: dict[Account, int] = {}
        """Number of the latest plan in which the account had a decode."""

    async def compute(self, call: Call) -> None:
        call.since_ns = now_ns()
        call.begun_ns = call.begun_ns or call.since_ns
        self.calls.append(call)
        self._has_calls.set()
        await call.done.wait()

    async def run(self, num_steps: int) -> None:
        while self.num_plans < num_steps:
            self._end_late_calls()
            if not self.calls:
                self._has_calls = trio.Event()
                await self._has_calls.wait()
                continue
            planned, num_now = list(self.calls), self._plan()
            await trio.sleep(self._check(num_now) / 1e9)
            self._settle([(call, now) for call, now in zip(planned, num_now, strict=True) if now])
            await trio.testing.wait_all_tasks_blocked()  # programs have their answers, and may have called again

    def _end_late_calls(self) -> None:
        for call in [call for call in self.calls if call.deadline_ns <= now_ns()]:
            self.calls.remove(call)
            call.is_late = True
            call.done.set()

    def _plan(self) -> list[int]:
        self._note_bounds()
        rows = np.zeros(len(self.calls), CANDIDATE)
        for row, call in zip(rows, self.calls, strict=True):
            for name in ("since_ns", "deadline_ns", "begun_ns", "share", "priority", "length", "left", "is_digested"):
                row[name] = getattr(call, name)
            row["is_decode"] = call.left == 1
        self.num_plans += 1
        num_now = self._policy.plan(rows, self._shares, now_ns()).tolist()
        for call, now in zip(self.calls, num_now, strict=True):
            assert now or self.num_plans <= call.latest_plan, (call, self.num_plans)
        return num_now

    def _note_bounds(self) -> None:
        """Note the latest plan of calls that have waited so long that only present calls can go before them."""
        now, by_kind, highest = now_ns(), defaultdict(list), dict[Account, int]()
        for call in self.calls:
            by_kind[call.account, call.left == 1].append(call)
            highest[call.account] = max(highest.get(call.account, call.priority), call.priority)
        for (account, _), calls in by_kind.items():
            for call in calls:
                if highest[account] > call.highest:
                    call.highest, call.latest_plan = highest[account], math.inf
                alone_s = max(PATIENCE_S, math.ceil((call.highest - call.priority) / AGING_PER_S))
                if call.latest_plan == math.inf and now - call.since_ns > alone_s * SECOND:
                    places = sum(-(-other.left // self.limits.min_chunk) for other in calls)
                    call.latest_plan = self.num_plans + places * account.plans_for_a_place

    def _check(self, num_now: list[int]) -> float:
        """Check the promises of every plan, and return the time of its step."""
        limits = self.limits
        served = [(call, now) for call, now in zip(self.calls, num_now, strict=True) if now]
        burst = self._full_burst()
        held = self._may_be_held(burst) - {call for call, _ in served}
        decodes = [now for call, now in zip(self.calls, num_now, strict=True) if call.left == 1 and call not in held]
        prefills = [(call, now) for call, now in zip(self.calls, num_now, strict=True) if call.left > 1]
        rows, seats = sum(now for _, now in prefills), sum(map(bool, num_now))
        assert seats <= limits.max_calls
        assert rows <= limits.max_tokens
        assert sum(now for call, now in prefills if call.is_digested) <= limits.max_digested
        if len(decodes) <= limits.max_calls - bool(prefills):
            assert all(decodes)
        else:
            assert sum(decodes) == limits.max_calls - bool(prefills), "no seat is left empty"
        if prefills:
            wanted = sum(call.left for call, _ in prefills if not call.is_digested)
            wanted += min(limits.max_digested, sum(call.left for call, _ in prefills if call.is_digested))
            least = limits.min_chunk if decodes and not held else limits.max_tokens
            assert rows >= min(wanted, least) or (rows and seats == limits.max_calls), "nothing is withheld"
        step_ns = self._cost(served)
        in_burst_ns = self._cost([(call, now) for call, now in served if call in burst])
        assert in_burst_ns <= self._pause_ns() + 1, "a burst takes no longer than that"
        if sum(now for call, now in served if call in burst) == rows:
            assert all(now_ns() - call.since_ns + step_ns <= self._pause_ns() + 1 for call in held), "held too long"
        computed = [(call, now) for call, now in served if call.left == 1]
        most_ns = max(limits.step_s * 1e9, BESIDE * self._cost(computed))
        burst_ns = self._cost(computed) * (1 + EAGER * self._crowding())
        most_ns = max(most_ns, min(burst_ns, LONGEST * limits.step_s * 1e9)) * (1 + 1e-9)
        late = [(call, now) for call, now in prefills if now and (now < call.left or self._is_late(call))]
        late = [(call, now) for call, now in late if call not in burst]
        num_late = sum(now for _, now in late)
        assert self._cost(computed + late) <= most_ns or num_late <= limits.min_chunk or not (decodes or held)
        self.num_held += len(held)
        self._decoded |= {call.account: self.num_plans for call, _ in computed}
        return step_ns

    def _full_burst(self) -> list[Call]:
        """Return the prefills of a burst that fills the step; none if there is no such burst."""
        limits, decodes = self.limits, [call for call in self.calls if call.left == 1]
        accounts = {account for account, plan in self._decoded.items() if plan > self.num_plans - THINKING}
        if not decodes or len(accounts | {call.account for call in self.calls}) > 1 or len(decodes) >= limits.max_calls:
            return []
        began_ns, urgent = min(call.begun_ns for call in decodes), max(call.priority for call in decodes)
        burst = [
            call
            for call in self.calls
            if 1 < call.left <= MOST_LONG * limits.max_tokens and call.priority >= urgent and not call.is_digested
            if self._full_ns(call) <= self._pause_ns() + 1
        ]
        is_full = len(burst) > 1 and sum(call.left for call in burst) >= limits.max_tokens
        return burst if is_full and now_ns() - began_ns <= LASTS * limits.step_s * SECOND else []

    def _pause_ns(self) -> float:
        return min(PAUSE * self.limits.step_s, PATIENCE_S) * SECOND

    def _full_ns(self, prefill: Call) -> float:
        """Return the time of max_tokens rows of prefills like this one."""
        rows, seen = self.limits.max_tokens, prefill.length + (min(prefill.left, self.limits.max_tokens) + 1) / 2
        return self._cost([], rows) + self.cost.pair_ns * rows * seen

    def _may_be_held(self, burst: list[Call]) -> set[Call]:
        """Return the decodes that the policy may leave out of a step that a burst fills."""
        limits, decodes = self.limits, [(call, 1) for call in self.calls if call.left == 1]
        full_ns = max(map(self._full_ns, burst), default=0)
        longest_ns = min(self._pause_ns(), HOLD * full_ns)
        num_early = sum(call.left for call in burst if not self._is_late(call))
        more_ns = self._cost(decodes, limits.max_tokens) - self._cost([], limits.max_tokens)
        if num_early < limits.max_tokens or more_ns < full_ns / WORTH - 1:
            return set()
        waited_ns = {call: now_ns() - call.since_ns for call, _ in decodes}
        return {
            call
            for call, waited in waited_ns.items()
            if waited + full_ns <= longest_ns + 1 and call.deadline_ns - call.since_ns > PATIENCE_S * SECOND
        }

    def _is_late(self, prefill: Call) -> bool:
        """Return whether a prefill was ready after the first token of a decode, or long after it beside its own."""
        decodes = [call for call in self.calls if call.left == 1]
        begun_ns = min((call.begun_ns for call in decodes), default=0)
        is_alone = all(call.account is prefill.account and call.priority <= prefill.priority for call in decodes)
        return prefill.since_ns > begun_ns + is_alone * TOGETHER * self.limits.step_s * SECOND

    def _crowding(self) -> float:
        """Return the most prefills of a burst that may wait for each decode, of the account for which they are fewest.

        Accounts that had decodes shortly before would lower the number: `policy.c` says when.
        """
        decodes = Counter(call.account for call in self.calls if call.left == 1)
        urgent = dict[Account, int]()
        for call in self.calls:
            if call.left == 1:
                urgent[call.account] = max(call.priority, urgent.get(call.account, call.priority))
        prefills = Counter(
            call.account for call in self.calls if call.left > 1 and call.priority >= urgent.get(call.account, 0)
        )
        return min((max(prefills[account] - 1, 0) / num for account, num in decodes.items()), default=0)

    def _cost(self, served: list[tuple[Call, int]], more_rows: int = 0) -> float:
        work = self._work
        work.num_rows = sum(now for _, now in served) + more_rows
        work.num_entries = work.num_seen = sum(call.length for call, _ in served if call.left == 1)
        prefills = [(call, now) for call, now in served if call.left > 1]
        work.num_pairs = sum(now * call.length + now * (now + 1) // 2 for call, now in prefills)
        return lib.sym_cost_of(self.cost, work)

    def _settle(self, served: list[tuple[Call, int]]) -> None:
        for call, now in served:
            call.left -= now
            call.length += now
            call.latest_plan, call.highest = math.inf, call.priority
            if not call.left:
                self.calls.remove(call)
                call.done.set()


def now_ns() -> int:
    return round(trio.current_time() * SECOND)
