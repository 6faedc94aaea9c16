"""What a step holds."""

import random
from dataclasses import dataclass

import pytest

from scheduler.batch.policy import AGING_PER_S, Limits, plan_step, prefilling

LIMITS = Limits(max_tokens=64, max_tokens_beside_decodes=16, max_calls=4)


@dataclass(frozen=True)
class Call:
    name: str
    num_left: int
    priority: int = 0
    waiting_since_s: float = 0.0
    num_digested: int = 0
    accounts: tuple[int, ...] = (1000,)


def named(plan):
    return [(call.name, num_now) for call, num_now in plan]


def test_a_lone_prefill_gets_the_whole_budget():
    assert named(plan_step([Call("a", 100)], LIMITS)) == [("a", 64)]


def test_a_prefill_that_fits_is_not_cut():
    assert named(plan_step([Call("a", 10)], LIMITS)) == [("a", 10)]


def test_decodes_go_first_and_shorten_a_prefill_beside_them():
    plan = plan_step([Call("long", 100), Call("d1", 1), Call("d2", 1)], LIMITS)
    assert named(plan) == [("d1", 1), ("d2", 1), ("long", 16)]


def test_prefills_share_the_budget_in_order_of_arrival():
    plan = plan_step([Call("a", 40), Call("b", 40), Call("c", 40)], LIMITS)
    assert named(plan) == [("a", 40), ("b", 24)]


def decodes(count, **of_each):
    return [Call(f"d{index}", 1, **of_each) for index in range(count)]


def test_a_step_never_holds_more_calls_than_allowed():
    assert named(plan_step(decodes(6), LIMITS)) == [("d0", 1), ("d1", 1), ("d2", 1), ("d3", 1)]


def test_a_prefill_has_a_seat_and_tokens_beside_any_number_of_decodes():
    plan = plan_step([*decodes(600, priority=100), Call("p", 100, priority=-100)], LIMITS)
    assert named(plan) == [("d0", 1), ("d1", 1), ("d2", 1), ("p", 16)]


def test_decodes_have_seats_beside_any_number_of_prefills():
    plan = plan_step([*(Call(f"p{index}", 2, priority=100) for index in range(600)), *decodes(3)], LIMITS)
    assert named(plan) == [("d0", 1), ("d1", 1), ("p0", 2), ("p1", 2)]


def test_where_seats_are_short_accounts_take_turns_whatever_their_priorities():
    calls = [*decodes(600, priority=100), Call("other", 1, accounts=(1001,), priority=-100)]
    assert ("other", 1) in named(plan_step(calls, LIMITS))


def test_domains_take_their_turns_within_their_owners():
    many = [Call(f"a{index}", 1, accounts=(1000, 7 + index)) for index in range(600)]
    plan = named(plan_step([*many, Call("b0", 1, accounts=(1001,)), Call("b1", 1, accounts=(1001,))], LIMITS))
    assert plan == [("a0", 1), ("b0", 1), ("a1", 1), ("b1", 1)]


def test_priority_decides_among_the_calls_of_one_account():
    plan = plan_step([*decodes(6), Call("urgent", 1, priority=1)], LIMITS)
    assert named(plan)[0] == ("urgent", 1)


def test_a_call_rises_in_priority_while_it_waits():
    now_s = 200 / AGING_PER_S + 1
    calls = [*decodes(6, priority=100, waiting_since_s=now_s), Call("patient", 1, priority=-100)]
    assert named(plan_step(calls, LIMITS, now_s))[0] == ("patient", 1)


def test_the_call_that_waited_longest_goes_first_whichever_its_kind():
    for old, new in (("p", "d"), ("d", "p")):
        calls = [
            Call(f"{kind}{account}", 2 if kind == "p" else 1, waiting_since_s=float(kind == new), accounts=(account,))
            for account in range(3)
            for kind in "dp"
        ]
        assert {f"{old}0", f"{old}1", f"{old}2"} < {name for name, _ in named(plan_step(calls, LIMITS, 2.0))}


def test_an_account_whose_prefill_had_tokens_goes_behind_the_others():
    calls = [Call("long", 1000), Call("short", 3, waiting_since_s=1.0, accounts=(1001,))]
    first = plan_step(calls, LIMITS, 1.0)
    assert named(first) == [("long", 64)]
    assert named(plan_step(calls, LIMITS, 2.0, dict.fromkeys(prefilling(first), 2.0))) == [("short", 3), ("long", 61)]


def test_a_users_domains_count_as_that_user_against_other_users():
    calls = [Call(f"long{index}", 1000, accounts=(1000, index)) for index in range(600)]
    calls.append(Call("short", 3, waiting_since_s=1.0, accounts=(1001,)))
    had_tokens = prefilling(plan_step(calls, LIMITS, 1.0))
    assert had_tokens == {(1000,), (1000, 0), (1000, 0, "prefills")}
    plan = named(plan_step(calls, LIMITS, 2.0, dict.fromkeys(had_tokens, 2.0)))
    assert plan == [("short", 3), ("long1", 61)], "and of its domains another one goes on"


@pytest.mark.parametrize("seed", range(6))
def test_nobody_waits_for_long_however_the_load_is_made(seed):
    """Loops that never end, of any size, priority and account: each gets something within a bounded number of steps."""
    chance = random.Random(seed)
    loops = [
        Call(
            str(index),
            chance.choice((1, 1, 2, 5, 200)),
            chance.choice((-100, 0, 0, 100)),
            accounts=chance.choice(((1000,), (1001,), (1001, 7), (1001, 8), (1002,))),
        )
        for index in range(chance.randrange(5, 60))
    ]
    left, since_s, served = {}, dict.fromkeys(range(len(loops)), 0.0), dict.fromkeys(range(len(loops)), 0)
    prefilled_s = {}
    num_steps, step_s = 1000, 0.15
    for step in range(num_steps):
        now_s = step * step_s
        waiting = [
            Call(each.name, left.get(each.name, each.num_left), each.priority, since_s[index], 0, each.accounts)
            for index, each in enumerate(loops)
        ]
        waiting.sort(key=lambda call: call.waiting_since_s)
        plan = plan_step(waiting, LIMITS, now_s, prefilled_s)
        prefilled_s |= dict.fromkeys(prefilling(plan), now_s + step_s)
        assert len(plan) == min(LIMITS.max_calls, len(loops)) or any(call.num_left > 1 for call in waiting)
        for call, num_now in plan:
            index = int(call.name)
            left[call.name] = call.num_left - num_now or loops[index].num_left
            if call.num_left == num_now:
                since_s[index] = now_s + step_s
                served[index] = step
    late = {loops[index]: step for index, step in served.items() if step <= num_steps // 2}
    assert not late


def test_nothing_waiting_gives_an_empty_step():
    assert not plan_step([], LIMITS)
