"""What a step holds."""

from dataclasses import dataclass

from scheduler.policy import Limits, plan_step

LIMITS = Limits(max_tokens=64, max_tokens_beside_decodes=16, max_calls=4)


@dataclass(frozen=True)
class Call:
    name: str
    num_left: int
    priority: int = 0
    submitted_s: float = 0.0
    num_digested: int = 0


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


def test_a_step_never_holds_more_calls_than_allowed():
    plan = plan_step([Call(str(i), 1) for i in range(6)] + [Call("p", 9)], LIMITS)
    assert named(plan) == [("0", 1), ("1", 1), ("2", 1), ("3", 1)]


def test_nothing_waiting_gives_an_empty_step():
    assert not plan_step([], LIMITS)
