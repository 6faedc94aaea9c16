"""What the next step holds: a pure function of the calls that wait, so that a better one can be tried alone.

Decodes (calls with one entry left) go first and all of them fit: a decode never waits more than one step.
What is left of the token budget goes to prefills in order of arrival, in chunks. Priority changes the order of both,
and whoever waits rises in it, so that nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """A call as the policy sees it."""

    @property
    def num_left(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def submitted_s(self) -> float: ...

    @property
    def num_digested(self) -> int:
        """Rows that it wants from memory of ours: more than one, and each of its entries has one."""
        ...


AGING_PER_S = 20.0
"""A call rises by so much in priority for each second that it waits: after ten, -100 goes before 100."""


CallT = TypeVar("CallT", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step."""

    max_tokens: int = 512
    """With no decode in the step: large enough that weights are read once for many rows."""
    max_tokens_beside_decodes: int = 128
    """With decodes in the step: a quarter, so that a long prefill delays them by a short step only."""
    max_calls: int = 256
    max_digested: int = 64
    """Rows of calls that want one for each entry: 13 MB for a vocabulary of 49,152."""

    def __post_init__(self) -> None:
        assert 0 < self.max_tokens_beside_decodes <= self.max_tokens
        assert self.max_calls > 0


def plan_step(waiting: Iterable[CallT], limits: Limits, now_s: float = 0.0) -> list[tuple[CallT, int]]:
    """`(call, entries to compute now)` for each call of the next step; `waiting` is in order of arrival."""
    calls = _in_order(list(waiting), now_s)
    plan = [(call, 1) for call in calls if call.num_left == 1][: limits.max_calls]
    budget = limits.max_tokens_beside_decodes if plan else limits.max_tokens
    digested = limits.max_digested
    for call in calls:
        if budget <= 0 or len(plan) >= limits.max_calls:
            break
        if call.num_left == 1:
            continue
        num_now = min(call.num_left, budget)
        if call.num_digested > 1:
            num_now = min(num_now, digested)
            digested -= num_now
        if num_now:
            plan.append((call, num_now))
            budget -= num_now
    return plan


def _in_order(calls: Sequence[CallT], now_s: float) -> Sequence[CallT]:
    if not any(call.priority for call in calls):
        return calls
    return sorted(calls, key=lambda call: -call.priority - AGING_PER_S * (now_s - call.submitted_s))
