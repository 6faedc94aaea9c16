"""Calls for the policy, as tests write them down, and a tree of shares for those who make them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler._loop import ffi
from scheduler.batch.policy import CANDIDATE, NO_DEADLINE, ROOT, Policy, StepLimits, new_shares

MS = 1_000_000
SECOND = 1_000_000_000


@dataclass(frozen=True)
class Call:
    name: str
    left: int
    priority: int = 0
    since_s: float = 0.0
    deadline_s: float | None = None
    user: int = 0
    account: int = 0
    program: int = 0
    length: int = 0
    num_shared: int = 0
    is_digested: bool = False
    is_forced: bool = False
    """A stretch that is computed whole, as a decode."""
    begun_s: float = -1.0
    """Begin of a decode: before all calls that wait here, unless a test says otherwise."""


def decodes(count, **of_each):
    return [Call(f"d{index}", 1, **of_each) for index in range(count)]


def prefills(count, left, **of_each):
    return [Call(f"p{index}", left, **of_each) for index in range(count)]


def new_cost(base_ms=0.0, row_ms=1.0, entry_us=0.0, pair_us=0.0):
    """Return the cost of a machine whose steps take this time."""
    cost = ffi.new("sym_cost *")
    cost.rows_ns = [(base_ms + row_ms * 2**knot) * MS for knot in range(len(cost.rows_ns))]
    cost.entry_ns, cost.pair_ns = entry_us * 1000, pair_us * 1000
    return cost


@dataclass
class Steps:
    """Steps of one policy, with shares that live as long: users, their accounts, and programs."""

    limits: StepLimits = field(
        default_factory=lambda: StepLimits(max_tokens=64, max_calls=4, min_chunk=8, step_s=0.020)
    )
    cost: object = field(default_factory=new_cost)
    weights: dict = field(default_factory=dict)
    """Weights by path: (user,), (user, account), (user, account, program)."""

    def __post_init__(self):
        self.policy = Policy(self.limits, self.cost)
        self.shares = new_shares([-1])
        self._numbers = {(): ROOT}

    def share(self, *path):
        if path not in self._numbers:
            new = new_shares([self.share(*path[:-1])], [self.weights.get(path, 1)])
            self._numbers[path] = len(self.shares)
            self.shares = np.concatenate([self.shares, new])
        return self._numbers[path]

    def candidates(self, calls: Sequence[Call]):
        array = np.zeros(len(calls), CANDIDATE)
        for row, call in zip(array, calls, strict=True):
            row["since_ns"] = round(call.since_s * SECOND)
            row["deadline_ns"] = NO_DEADLINE if call.deadline_s is None else round(call.deadline_s * SECOND)
            row["share"] = self.share(call.user, call.account, call.program)
            row["priority"], row["length"], row["left"] = call.priority, call.length, call.left
            row["num_shared"], row["is_digested"] = call.num_shared, call.is_digested
            row["is_decode"], row["begun_ns"] = call.left == 1 or call.is_forced, round(call.begun_s * SECOND)
        return array

    def plan(self, calls: Sequence[Call], now_s=0.0):
        """Entries by call, of those in the step."""
        candidates = self.candidates(calls)
        num_now = self.policy.plan(candidates, self.shares, round(now_s * SECOND))
        return {call.name: int(now) for call, now in zip(calls, num_now, strict=True) if now}
