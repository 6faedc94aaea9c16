"""What the next step holds: a pure function of the calls that wait, so that a better one can be tried alone.

Decodes (calls with one entry left) go first and all of them fit: a decode never waits more than one step.
What is left of the token budget goes to prefills in order of arrival, in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """A call as the policy sees it."""

    @property
    def num_left(self) -> int: ...


CallT = TypeVar("CallT", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step."""

    max_tokens: int = 512
    """With no decode in the step: large enough that weights are read once for many rows."""
    max_tokens_beside_decodes: int = 128
    """With decodes in the step: a quarter, so that a long prefill delays them by a short step only."""
    max_calls: int = 256

    def __post_init__(self) -> None:
        assert 0 < self.max_tokens_beside_decodes <= self.max_tokens
        assert self.max_calls > 0


def plan_step(waiting: Iterable[CallT], limits: Limits) -> list[tuple[CallT, int]]:
    """`(call, entries to compute now)` for each call of the next step; `waiting` is in order of arrival."""
    waiting = list(waiting)
    plan = [(call, 1) for call in waiting if call.num_left == 1][: limits.max_calls]
    budget = limits.max_tokens_beside_decodes if plan else limits.max_tokens
    for call in waiting:
        if budget <= 0 or len(plan) >= limits.max_calls:
            break
        if call.num_left > 1:
            num_now = min(call.num_left, budget)
            plan.append((call, num_now))
            budget -= num_now
    return plan
