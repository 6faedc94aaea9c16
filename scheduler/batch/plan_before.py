"""What a step holds, as it is planned in Python until the loop in C plans it by `policy.c`.

Up to `max_calls` calls fit a step. Decodes (calls with one entry left) take nothing but a seat. Prefills share a budget
of tokens, in chunks. While every decode has a seat, all of them go, so a decode waits for one step at most.

Whatever is short, seats or tokens, goes round in turns:

- users take turns, and the domains of one user take theirs within the user's;
- within an account its decodes and its prefills take turns, so neither kind can keep the other out;
- among calls of one kind and account priority decides, and a call rises in it while it waits.

Of those whose turn it is, the one goes first that has waited longest, whichever its kind. A generation waits anew with
each of its tokens. An account whose prefill had tokens goes behind those whose prefills had none since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

Path: TypeAlias = "tuple[int | str, ...]"
"""Where a call takes its turns: the numbers of its accounts from the uid inwards, then its kind."""


class Waiting(Protocol):
    """A call as the policy sees it."""

    @property
    def num_left(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def waiting_since_s(self) -> float:
        """When its turn began: of a generation that of its latest token."""
        ...

    @property
    def accounts(self) -> tuple[int, ...]:
        """The numbers of those who pay: a uid, then the domains within it, the inmost last."""
        ...

    @property
    def num_digested(self) -> int:
        """Rows that it wants from memory of ours: more than one, and each of its entries has one."""
        ...


AGING_PER_S = 20.0
"""A call rises by so much in priority for each second that it waits: after ten, -100 goes before 100."""


CallT = TypeVar("CallT", bound=Waiting)


class Limits(Protocol):
    """Bounds of one step, see `policy.Limits`."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def max_calls(self) -> int: ...

    @property
    def max_digested(self) -> int: ...


def plan_step(
    waiting: Iterable[CallT], limits: Limits, now_s: float = 0.0, prefilled_s: Mapping[Path, float] | None = None
) -> list[tuple[CallT, int]]:
    """`(call, entries to compute now)` for each call of the next step, decodes first; `waiting` is in order of arrival.

    `prefilled_s`: when a prefill last had tokens, by what `prefilling` says of a plan.
    """
    calls = list(waiting)
    num_decodes = sum(call.num_left == 1 for call in calls)
    if num_decodes == len(calls) <= limits.max_calls:
        return [(call, 1) for call in calls]
    decodes: list[tuple[CallT, int]] = []
    prefills: list[tuple[CallT, int]] = []
    budget = limits.max_tokens // 4 if num_decodes else limits.max_tokens
    digested = limits.max_digested
    for call in _in_turns(calls, now_s, prefilled_s or {}):
        if len(decodes) + len(prefills) == limits.max_calls:
            break
        if call.num_left == 1:
            decodes.append((call, 1))
            continue
        num_now = min(call.num_left, budget)
        if call.num_digested > 1:
            num_now = min(num_now, digested)
            digested -= num_now
        if num_now:
            prefills.append((call, num_now))
            budget -= num_now
    return decodes + prefills


def prefilling(plan: Iterable[tuple[Waiting, int]]) -> set[Path]:
    """Whose prefills have tokens in this plan: their paths, and each beginning of them."""
    paths = {_path(call) for call, _ in plan if call.num_left > 1}
    return {path[: end + 1] for path in paths for end in range(len(path))}


def _path(call: Waiting) -> Path:
    return (*call.accounts, "decodes" if call.num_left == 1 else "prefills")


def _in_turns(calls: Iterable[CallT], now_s: float, prefilled_s: Mapping[Path, float]) -> Iterator[CallT]:
    """The calls in the order in which they get what is short."""
    queues: dict[Path, list[CallT]] = {}
    for call in calls:
        queues.setdefault(_path(call), []).append(call)
    return _take_turns({path: _by_priority(queue, now_s) for path, queue in queues.items()}, (), prefilled_s)


def _take_turns(
    queues: Mapping[Path, Sequence[CallT]], start: Path, prefilled_s: Mapping[Path, float]
) -> Iterator[CallT]:
    """From these queues, whose paths have this start: what goes on from it takes turns."""
    if start in queues:
        yield from queues[start]  # a whole path: there is no other
        return
    groups: dict[Path, dict[Path, Sequence[CallT]]] = {}
    for path, queue in queues.items():
        groups.setdefault(path[: len(start) + 1], {})[path] = queue
    # Tokens that a prefill of the group had count as if each of its calls had had them.
    turns = [(_take_turns(group, path, prefilled_s), prefilled_s.get(path, 0.0)) for path, group in groups.items()]
    while len(turns) > 1:
        firsts = [next(group, None) for group, _ in turns]
        found = [(call, turn) for call, turn in zip(firsts, turns, strict=True) if call is not None]
        found.sort(key=lambda each: max(each[0].waiting_since_s, each[1][1]))
        yield from (call for call, _ in found)
        turns = [turn for _, turn in found]
    for group, _ in turns:
        yield from group


def _by_priority(calls: Sequence[CallT], now_s: float) -> Sequence[CallT]:
    """Those of one kind and account."""
    if not any(call.priority for call in calls):
        return calls
    return sorted(calls, key=lambda call: -call.priority - AGING_PER_S * (now_s - call.waiting_since_s))
