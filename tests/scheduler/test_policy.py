"""The calls that a step holds."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from scheduler._loop import ffi, lib
from scheduler.batch.policy import CANDIDATE, SHARE, StepLimits
from tests.scheduler.policy_loads import MS, Call, Steps, after, decodes, new_cost, prefills

AGING_PER_S = 20
PATIENCE_S = 5


def planned(calls, now_s=0.0, **settings):
    return Steps(**settings).plan(calls, now_s)


def test_nothing_waiting_gives_an_empty_step():
    assert planned([]) == {}


def test_a_lone_prefill_gets_all_rows():
    assert planned([Call("a", 100)]) == {"a": 64}


def test_a_prefill_that_fits_is_not_cut():
    assert planned([Call("a", 10)]) == {"a": 10}


def test_prefills_share_the_rows_in_order_of_arrival():
    assert planned(prefills(3, 40)) == {"p0": 40, "p1": 24}


def test_a_prefill_beside_decodes_gets_the_rows_that_the_step_has_time_for():
    calls = [Call("long", 100), *decodes(2)]
    assert planned(calls) == {"long": 18, "d0": 1, "d1": 1}, "20 ms, of which a row takes one"
    assert planned(calls, cost=new_cost(row_ms=0.1)) == {"long": 64, "d0": 1, "d1": 1}
    assert planned(calls, cost=new_cost(row_ms=10)) == {"long": 8, "d0": 1, "d1": 1}, "slow: but its least chunk"


def test_what_a_prefill_and_the_decodes_read_takes_time_from_its_rows():
    calls = [Call("long", 100, length=1000), Call("d", 1, length=1000)]
    assert planned(calls, cost=new_cost(entry_us=5)) == {"long": 14, "d": 1}, "5 ms for the entries of the decode"
    assert planned(calls, cost=new_cost(pair_us=0.5)) == {"long": 12, "d": 1}, "each row sees a thousand entries"


def test_entries_that_decodes_share_are_read_once():
    calls = [Call("long", 100), *decodes(2, length=1000)]
    shared = [*calls[:2], replace(calls[2], num_shared=1000)]
    cost = new_cost(entry_us=5)
    assert planned(calls, cost=cost) == {"long": 9, "d0": 1, "d1": 1}, "12 ms for the decodes, three quarters more"
    assert planned(shared, cost=cost) == {"long": 13, "d0": 1, "d1": 1}


def test_what_decodes_read_is_in_the_price_of_a_row():
    steps = Steps(cost=new_cost(base_ms=10, entry_us=5))
    assert steps.plan([Call("long", 100), *decodes(2, length=1000)]) == {"long": 16, "d0": 1, "d1": 1}
    assert steps.shares["used"][steps.share(0)] == pytest.approx(38 * MS), "the calls pay for the time of their step"


def test_short_prefills_fill_the_step_together():
    assert planned([Call("d", 1), *prefills(3, 8)]) == {"d": 1, "p0": 8, "p1": 8, "p2": 3}


def test_prefills_that_came_before_the_decodes_had_begun_are_not_held_back_for_them():
    begun = decodes(2, begun_s=3.0)
    assert planned([*begun, Call("p", 30, since_s=2.0), Call("q", 30, since_s=2.5)], 4) == {
        "d0": 1,
        "d1": 1,
        "p": 30,
        "q": 30,
    }
    assert planned([*begun, Call("p", 30, since_s=3.5)], 4)["p"] == 18, "it came later"
    older = Call("older", 1, begun_s=1.0)
    assert planned([*begun, older, Call("p", 30, since_s=2.0)], 4)["p"] == 17, "one has gone on for longer"


def test_a_prefill_that_came_before_the_decodes_but_is_long_is_held_back():
    long = Call("long", 500, since_s=0.0)
    plan = planned([*decodes(2, begun_s=3.0), long, Call("p", 30, since_s=2.0)], 4)
    assert plan == {"d0": 1, "d1": 1, "long": 18, "p": 30}, "and who came behind it is not"


def test_what_a_grammar_forces_is_computed_whole_beside_any_prefill():
    forced = Call("forced", 12, is_forced=True)
    assert planned([*decodes(2), forced, Call("p", 100)]) == {"d0": 1, "d1": 1, "forced": 12, "p": 10}


def test_a_step_never_holds_more_calls_than_allowed():
    assert planned(decodes(6)) == {"d0": 1, "d1": 1, "d2": 1, "d3": 1}


def test_a_prefill_has_a_seat_and_rows_beside_any_number_of_decodes():
    plan = planned([*decodes(600, priority=100), Call("p", 100, priority=-100)])
    assert plan == {"d0": 1, "d1": 1, "d2": 1, "p": 17}


def test_decodes_have_their_seats_beside_any_number_of_prefills():
    plan = planned([*prefills(600, 2, priority=100), *decodes(3)])
    assert plan == {"d0": 1, "d1": 1, "d2": 1, "p0": 2}


def test_rows_of_ours_are_bounded_and_others_go_on():
    limits = StepLimits(max_tokens=64, max_calls=4, max_digested=6, min_chunk=6)
    calls = [Call("a", 5, is_digested=True), Call("b", 5, is_digested=True), Call("c", 5, is_digested=True)]
    assert planned([*calls, Call("d", 5)], limits=limits) == {"a": 5, "b": 1, "d": 5}


def test_where_seats_are_short_users_share_them_whatever_their_priorities():
    calls = [*decodes(600, priority=100), *(Call(f"o{index}", 1, user=1, priority=-100) for index in range(600))]
    assert sorted(planned(calls)) == ["d0", "d1", "o0", "o1"]


def test_accounts_share_within_their_users():
    many = [Call(f"a{index}", 1, account=7 + index) for index in range(600)]
    assert sorted(planned([*many, Call("b0", 1, user=1), Call("b1", 1, user=1)])) == ["a0", "a1", "b0", "b1"]


def test_programs_of_one_account_share_its_seats():
    calls = [*decodes(600), Call("x", 1, program=1), Call("y", 1, program=2)]
    assert sorted(planned(calls)) == ["d0", "d1", "x", "y"]


def test_priority_decides_among_the_calls_of_one_account():
    assert "urgent" in planned([*decodes(6), Call("urgent", 1, priority=1)])


def test_equal_priorities_differ_in_nothing_however_long_they_wait():
    calls = [*decodes(4, since_s=0), Call("due", 1, since_s=3.9, deadline_s=9)]
    assert "due" in planned(calls, now_s=4)


def test_a_call_rises_in_priority_while_it_waits():
    now_s = 200 / AGING_PER_S + 1
    calls = [*decodes(6, priority=100, since_s=now_s), Call("patient", 1, priority=-100)]
    assert "patient" in planned(calls, now_s)
    early = [replace(call, since_s=now_s - 3 if call.name == "patient" else now_s) for call in calls]
    assert "patient" not in planned(early, now_s)


def test_it_rises_to_those_that_are_there_and_not_above():
    calls = [*decodes(4, since_s=3, deadline_s=8), Call("old", 1, since_s=0)]
    assert "old" not in planned(calls, now_s=4), "its level is theirs, and they have deadlines"


def test_the_earliest_deadline_goes_first_and_none_goes_last():
    calls = [*decodes(3), *(Call(f"due{at}", 1, deadline_s=at) for at in (9, 5, 7, 6, 8))]
    assert sorted(planned(calls)) == ["due5", "due6", "due7", "due8"]


def test_deadlines_order_within_an_account_only():
    calls = [*decodes(6, deadline_s=1), *(Call(f"o{index}", 1, user=1) for index in range(6))]
    assert sorted(planned(calls)) == ["d0", "d1", "o0", "o1"]


def test_a_call_without_deadline_is_due_when_it_has_waited_long():
    def calls(now_s):
        return [*decodes(4, since_s=now_s - 0.1, deadline_s=now_s + 0.1), Call("patient", 1)]

    assert "patient" not in planned(calls(PATIENCE_S - 1), PATIENCE_S - 1)
    assert "patient" in planned(calls(PATIENCE_S + 1), PATIENCE_S + 1)


def test_a_deadline_far_away_is_no_worse_than_none():
    calls = [*decodes(4, since_s=1), Call("patient", 1, deadline_s=3600)]
    assert "patient" in planned(calls, PATIENCE_S + 2)


def test_rows_go_to_the_account_that_had_less():
    steps = Steps()
    calls = [Call("long", 1000), Call("short", 10, user=1)]
    assert steps.plan(calls[:1]) == {"long": 64}
    assert steps.plan(calls) == {"short": 10, "long": 54}


def served(steps, calls, num_steps, step_s=0.01):
    """Entries of each call when all of them begin anew whenever they are complete."""
    counts = Counter()
    now = calls
    for step in range(num_steps):
        plan = steps.plan(now, step * step_s)
        counts.update(plan)
        now = after_all(now, calls, plan)
    return counts


def after_all(now, calls, plan):
    left = {call.name: call.left for call in after(now, plan)}
    whole = {call.name: call.left for call in calls}
    complete = {call.name for call in now if plan.get(call.name) == call.left}
    return [replace(call, left=whole[call.name] if call.name in complete else left[call.name]) for call in now]


@pytest.mark.parametrize("left", [1, 500])
def test_service_is_as_the_weights(left):
    steps = Steps(weights={(0,): 1, (1,): 3, (1, 0): 1, (1, 1): 2})
    calls = [
        Call(f"{user}{account} {index}", left, user=user, account=account)
        for user, account in ((0, 0), (1, 0), (1, 1))
        for index in range(20)
    ]
    counts = Counter()
    for name, count in served(steps, calls, 600).items():
        counts[name[:2]] += count
    assert counts["10"] / counts["00"] == pytest.approx(1, rel=0.05)
    assert counts["11"] / counts["00"] == pytest.approx(2, rel=0.05)


def test_who_was_idle_has_no_more_than_others_when_it_comes_back():
    steps = Steps()
    always, back = [Call("always", 10**6)], [Call("back", 10**6, user=1)]
    served(steps, always + back, 10)
    served(steps, always, 300)
    counts = served(steps, always + back, 100)
    assert counts["back"] / counts["always"] == pytest.approx(1, abs=0.05)


def test_who_had_all_it_wanted_saved_nothing_up():
    steps = Steps()
    always, modest, eager = [Call("always", 10**6)], [Call("modest", 2, user=1)], [Call("modest", 10**6, user=1)]
    served(steps, always + modest, 300)
    counts = served(steps, always + eager, 100)
    assert counts["modest"] / counts["always"] == pytest.approx(1, abs=0.05)


def test_decodes_that_nobody_lacked_do_not_keep_a_prefill_back_for_long():
    steps = Steps(limits=StepLimits(max_calls=16, max_tokens=64, min_chunk=8, step_s=0.020))
    many = [*decodes(12), Call("other", 10**6, user=1)]
    served(steps, many, 300)
    counts = served(steps, [*many, Call("mine", 10**6)], 400)
    assert counts["mine"] >= 400 / (16 * 2 + 2) * 8 - 8, "a place in so many plans at least"
    assert counts["other"] > counts["mine"], "the one who is ahead in time has less of the rows"


def test_nobody_pays_for_hours_for_what_nobody_lacked():
    """Decodes that all went put the first user ahead; seats are short, and it is the second one's turn for a while."""
    steps = Steps(limits=StepLimits(max_calls=16, max_tokens=64, min_chunk=8, step_s=0.020))
    served(steps, [*decodes(14), Call("p", 10**6, user=1)], 1000)
    counts = served(steps, [*decodes(30), *(Call(f"o{index}", 1, user=1) for index in range(30))], 200)
    mine = sum(count for name, count in counts.items() if name.startswith("d"))
    assert mine > 0.2 * sum(counts.values())


def test_a_call_that_found_its_rows_of_ours_taken_has_its_turn():
    limits = StepLimits(max_tokens=64, max_calls=4, max_digested=16, min_chunk=8)
    calls = [
        Call("first", 10**6, is_digested=True),
        Call("second", 10**6, user=1, account=1, is_digested=True),
        Call("plain", 10**6, user=1, account=2),
    ]
    counts = served(Steps(limits=limits), calls, 400)
    assert counts["second"] >= 8 * (400 // (16 * 2 + 2 * (16 * 2 + 2)) - 1)


def test_months_of_service_cost_no_precision():
    steps = Steps()
    calls = [Call("a", 10**6), Call("b", 10**6, user=1)]
    served(steps, calls, 4)
    steps.shares["clock"][0] += 1e18
    steps.shares["used"][1:] += 1e18
    counts = served(steps, calls, 300)
    assert counts["a"] / counts["b"] == pytest.approx(1, abs=0.02)
    assert steps.shares["used"].max() < 1e13


def test_a_step_of_all_calls_compares_none():
    steps = Steps(limits=StepLimits())
    assert len(steps.plan(decodes(256))) == 256
    assert steps.policy.num_compared == 0


def test_comparisons_grow_no_faster_than_sorting():
    per_call = {}
    for count in (64, 4096):
        chance = random.Random(0)
        calls = [
            Call(f"{i}", chance.choice((1, 5)), chance.randrange(-9, 9), user=chance.randrange(9), program=i % 50)
            for i in range(count)
        ]
        steps = Steps(limits=StepLimits(max_calls=count // 2, min_chunk=512, max_digested=512))
        steps.plan(calls, 1.0)
        per_call[count] = steps.policy.num_compared / count
    assert per_call[4096] <= per_call[64] * (12 / 6) * 1.5


def test_the_arrays_are_the_structures_of_c():
    candidate = np.zeros(1, CANDIDATE)
    candidate["left"], candidate["deadline_ns"] = 7, 9
    there = ffi.from_buffer("sym_candidate[]", candidate)[0]
    assert (there.left, there.deadline_ns) == (7, 9)
    share = np.zeros(1, SHARE)
    share["last_plan"] = [[3, 4]]
    assert list(ffi.from_buffer("sym_share[]", share)[0].last_plan) == [3, 4]


@pytest.mark.parametrize(("step_ms", "wait_ms"), [(1, 0.3), (10, 1.0), (100, 3.0)])
def test_the_wait_is_a_share_of_the_step_within_bounds(step_ms, wait_ms):
    wait = ffi.new("sym_wait *", {"share_percent": 10, "min_ns": 300_000, "max_ns": 3 * MS})
    assert lib.sym_policy_wait_ns(wait, step_ms * MS) == round(wait_ms * MS)
