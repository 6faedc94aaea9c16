"""The calls that a step holds."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from scheduler._loop import ffi, lib
from scheduler.batch.policy import CANDIDATE, SHARE, StepLimits
from tests.scheduler.policy_loads import MS, Call, Steps, decodes, new_cost, prefills

AGING_PER_S = 20
PATIENCE_S = 5
LONG = Call("long", 100)
OLD = Call("d", 1, begun_s=-11.0)
OTHERS = [Call(f"o{index}", 1, user=1) for index in range(6)]
DIGESTED = [Call(name, 5, is_digested=True) for name in "abc"]
SMALL_PART = [Call("d", 1), Call("o", 1, user=1), Call("q0", 40, user=1)]
OF_FOUR = {f"d{index}": 1 for index in range(4)}
HALF_AND_HALF = {"d0": 1, "d1": 1, "o0": 1, "o1": 1}

PLANS = {
    "nothing waiting gives an empty step": ([], {}),
    "a lone prefill gets all rows": ([LONG], {"long": 64}),
    "a prefill that fits is not cut": ([Call("a", 10)], {"a": 10}),
    "prefills share the rows in order of arrival": (prefills(3, 40), {"p0": 40, "p1": 24}),
    "beside decodes a prefill gets the rows that 20 ms have time for": (
        [LONG, *decodes(2)], {"long": 18, "d0": 1, "d1": 1}
    ),
    "more of quick rows": ([LONG, *decodes(2)], {"long": 64, "d0": 1, "d1": 1}, {"row_ms": 0.1}),
    "of slow rows its least chunk": ([LONG, *decodes(2)], {"long": 8, "d0": 1, "d1": 1}, {"row_ms": 10}),
    "the entries of a decode take their 5 ms": (
        [replace(LONG, length=1000), Call("d", 1, length=1000)], {"long": 14, "d": 1}, {"entry_us": 5}
    ),
    "each row of a prefill sees a thousand entries": (
        [replace(LONG, length=1000), Call("d", 1, length=1000)], {"long": 12, "d": 1}, {"pair_us": 0.5}
    ),
    "12 ms for the decodes leave three quarters more": (
        [LONG, *decodes(2, length=1000)], {"long": 9, "d0": 1, "d1": 1}, {"entry_us": 5}
    ),
    "entries that decodes share are read once": (
        [LONG, Call("d0", 1, length=1000), Call("d1", 1, length=1000, num_shared=1000)],
        {"long": 13, "d0": 1, "d1": 1},
        {"entry_us": 5},
    ),
    "short prefills fill the step together": (
        [Call("d", 1), *prefills(3, 8)], {"d": 1, "p0": 8, "p1": 8, "p2": 8}
    ),
    "the shorter prefill of a program goes first": ([LONG, Call("a", 10)], {"long": 54, "a": 10}),
    "in a burst prefills get sixteen times the time of a decode for each that waits behind the first": (
        [OLD, *prefills(3, 40)], {"d": 1, "p0": 32}
    ),
    "and all decodes have a part in that": (
        [*decodes(2, begun_s=-11.0), *prefills(2, 40)], {"d0": 1, "d1": 1, "p0": 18}
    ),
    "but no step of a burst is longer than 150 ms": (
        [OLD, *prefills(60, 8)], {"d": 1, "p0": 8, "p1": 6}, {"row_ms": 10}
    ),
    "a burst fills the step while its decodes are young": (
        [Call("d", 1), *prefills(2, 40)], {"d": 1, "p0": 40, "p1": 24}
    ),
    "if its prefills have as many rows": ([Call("d", 1), *prefills(2, 31)], {"d": 1, "p0": 19}),
    "no longer than a second": ([Call("d", 1), *prefills(60, 8)], {"d": 1, "p0": 8}, {"row_ms": 16}),
    "not with prefills that see so many entries that it takes longer": (
        [Call("d", 1), *prefills(2, 40, length=1000)], {"d": 1, "p0": 8}, {"pair_us": 16}
    ),
    "but with others beside such a prefill": (
        [Call("d", 1), Call("far", 30, length=1000), *prefills(2, 40)],
        {"d": 1, "far": 8, "p0": 40, "p1": 16},
        {"pair_us": 16},
    ),
    "without prefills that are far longer than a step": ([Call("d", 1), *prefills(2, 257)], {"d": 1, "p0": 19}),
    "without prefills whose rows the run digests": (
        [Call("d", 1), *prefills(2, 40, is_digested=True)], {"d": 1, "p0": 19}
    ),
    "without prefills of a lower priority than a decode": (
        [Call("d", 1, priority=1), *prefills(2, 40)], {"d": 1, "p0": 19}
    ),
    "while no other account has calls": (
        [Call("d", 1), *prefills(2, 40), Call("o", 10, user=1)], {"d": 1, "o": 10, "p0": 9}
    ),
    "while all decodes have seats": ([*decodes(4), *prefills(2, 40)], {"d0": 1, "d1": 1, "d2": 1, "p0": 17}),
    "with the last seat if need be": ([*decodes(3), *prefills(2, 40)], {"d0": 1, "d1": 1, "d2": 1, "p0": 40}),
    "an urgent decode is not held back by a burst that is not": (
        [Call("d", 1, priority=1), *prefills(5, 40)], {"d": 1, "p0": 19}
    ),
    "a burst does not hold back the decodes of another account": (
        [Call("d", 1), *(replace(each, user=1) for each in prefills(5, 40))], {"d": 1, "p0": 19}
    ),
    "nor of an account that has a smaller part in it": (
        [*SMALL_PART, *prefills(9, 40)], {"d": 1, "o": 1, "p0": 18}
    ),
    "what a grammar forces is computed whole beside any prefill": (
        [*decodes(2), Call("forced", 12, is_forced=True), Call("p", 100)], {"d0": 1, "d1": 1, "forced": 12, "p": 10}
    ),
    "a step never holds more calls than allowed": (decodes(6), OF_FOUR),
    "a prefill has a seat and rows beside any number of decodes": (
        [*decodes(600, priority=100), replace(LONG, priority=-100)], {"d0": 1, "d1": 1, "d2": 1, "long": 17}
    ),
    "decodes have their seats beside any number of prefills": (
        [*prefills(600, 2, priority=100), *decodes(3)], {"d0": 1, "d1": 1, "d2": 1, "p0": 2}
    ),
    "where seats are short users share them whatever their priorities": (
        [*decodes(600, priority=100), *(replace(each, priority=-100) for each in OTHERS)], HALF_AND_HALF
    ),
    "accounts share within their users": (
        [*(Call(f"d{index}", 1, account=7 + index) for index in range(600)), *OTHERS[:2]], HALF_AND_HALF
    ),
    "programs of one account share its seats": (
        [*decodes(600), Call("x", 1, program=1), Call("y", 1, program=2)], {"d0": 1, "d1": 1, "x": 1, "y": 1}
    ),
    "priority decides among the calls of one account": (
        [*decodes(6), Call("urgent", 1, priority=1)], {"urgent": 1, "d0": 1, "d1": 1, "d2": 1}
    ),
    "the earliest deadline goes first and none goes last": (
        [*decodes(3), *(Call(f"due{at}", 1, deadline_s=at) for at in (9, 5, 7, 6, 8))],
        {"due5": 1, "due6": 1, "due7": 1, "due8": 1},
    ),
    "deadlines order within an account only": ([*decodes(6, deadline_s=1), *OTHERS], HALF_AND_HALF),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS.values(), ids=PLANS)
def test_a_step_holds(case):
    calls, expected, *cost = case
    assert Steps(cost=new_cost(**dict(*cost))).plan(calls) == expected


def test_rows_of_ours_are_bounded_and_others_go_on():
    steps = Steps(StepLimits(max_tokens=64, max_calls=4, max_digested=6, min_chunk=6))
    assert steps.plan([*DIGESTED, Call("d", 5)]) == {"a": 5, "b": 1, "d": 5}


def test_what_decodes_read_is_in_the_price_of_a_row():
    steps = Steps(cost=new_cost(base_ms=10, entry_us=5))
    assert steps.plan([LONG, *decodes(2, length=1000)]) == {"long": 16, "d0": 1, "d1": 1}
    assert steps.shares["used"][steps.share(0)] == pytest.approx(38 * MS), "the calls pay for the time of their step"


def test_the_calls_of_a_burst_pay_for_the_time_of_its_step():
    steps = Steps(StepLimits(max_tokens=64, max_calls=16, min_chunk=8, step_s=0.020), new_cost(base_ms=10))
    assert steps.plan([*decodes(7), *prefills(2, 40)])["p1"] == 24
    assert steps.shares["used"][steps.share(0)] == pytest.approx(81 * MS)


def test_prefills_that_decodes_are_held_for_pay_for_the_time_of_their_step():
    cost = new_cost(base_ms=10)
    cost.head_ns = 8 * MS
    steps = Steps(StepLimits(max_tokens=64, max_calls=16, min_chunk=8, step_s=0.020), cost)
    assert steps.plan(CROWD) == HELD
    assert steps.shares["used"][steps.share(0)] == pytest.approx(82 * MS)


def test_a_burst_fills_no_step_of_more_than_five_seconds():
    for row_ms, expected in ((78, 40), (79, 16)):
        steps = Steps(StepLimits(max_tokens=64, max_calls=4, min_chunk=8, step_s=1.0), new_cost(row_ms=row_ms))
        assert steps.plan([Call("d", 1), *prefills(2, 40, since_s=30.0)], 30.0)["p0"] == expected


def test_prefills_that_came_before_the_decodes_had_begun_are_not_held_back_for_them():
    begun, p, q = decodes(2, begun_s=3.0), Call("p", 30, since_s=2.0), Call("q", 30, since_s=2.5)
    both = {"d0": 1, "d1": 1}
    assert Steps().plan([*begun, p, q], 4) == both | {"p": 30, "q": 30}
    assert Steps().plan([*begun, replace(p, since_s=3.5)], 4) == both | {"p": 30}, "it came soon afterwards"
    assert Steps().plan([*begun, replace(p, since_s=3.6)], 4)["p"] == 18, "it came later"
    soon = [*begun, replace(p, since_s=3.1)]
    assert Steps().plan([*soon, Call("o", 1, user=1, begun_s=3.0)], 4)["p"] == 17, "another account does not wait"
    assert Steps().plan([*soon, Call("u", 1, priority=1, begun_s=3.0)], 4)["p"] == 17, "nor does a higher priority"
    steps = Steps()
    steps.plan([Call("o", 1, user=1)])
    assert steps.plan(soon, 4)["p"] == 18, "nor does an account that had decodes shortly before"
    assert Steps().plan([*begun, Call("older", 1, begun_s=1.0), p], 4)["p"] == 17, "one has gone on for longer"
    long = [Call(name, 500, since_s=0.0) for name in ("long", "longer")]
    for held_back, in_burst in ((long[:1], {}), (long, {"long": 2})):
        plan = Steps().plan([*begun, *held_back, p], 4)
        assert plan == both | in_burst | {"p": 30}, "a long one is held back, and a short one that came later is not"


CROWD = [*decodes(8, begun_s=-0.05), *prefills(2, 40)]
HELD = {"p0": 40, "p1": 24}
ALL = HELD | {f"d{index}": 1 for index in range(8)}
"""A step of 64 rows takes 64 ms, and each decode adds 1 ms."""


@pytest.mark.parametrize(
    ("calls", "now_s", "step_s", "expected"),
    [
        (CROWD, 0.192, 0.02, HELD),
        (CROWD, 0.193, 0.02, ALL),
        (CROWD, 0.036, 0.002, HELD),
        (CROWD, 0.037, 0.002, ALL),
        (CROWD[1:], 0.1, 0.02, {name: now for name, now in ALL.items() if name != "d0"}),
        ([Call("late", 1, since_s=-0.1, begun_s=-0.5), *CROWD], 0.1, 0.02, HELD | {"late": 1}),
        ([Call("due", 1, deadline_s=5.0, begun_s=-0.5), *CROWD], 0.1, 0.02, HELD | {"due": 1}),
        ([Call("due", 1, deadline_s=5.1, begun_s=-0.5), *CROWD], 0.1, 0.02, HELD),
        ([Call("old", 1, begun_s=-0.6), *CROWD], 0.1, 0.02, {**ALL, "old": 1}),
        ([Call("urgent", 1, priority=1), *CROWD], 0.1, 0.02, {**ALL, "urgent": 1, "p0": 11, "p1": 0}),
        ([Call("other", 1, user=1), *CROWD], 0.1, 0.02, {**ALL, "other": 1, "p0": 11, "p1": 0}),
    ],
    ids=[
        "four steps",
        "not longer",
        "50 times step_ms",
        "not longer than that",
        "not seven decodes which cost less than an eighth of the step",
        "not a decode that has waited long",
        "not a decode that is due within five seconds",
        "a decode that is due later",
        "not beside a decode that began long before",
        "not beside a decode of a higher priority",
        "not beside a decode of another account",
    ],
)
def test_decodes_are_held_for_prefills_of_their_burst(calls, now_s, step_s, expected):
    limits = StepLimits(max_tokens=64, max_calls=16, min_chunk=8, step_s=step_s)
    assert Steps(limits).plan(calls, now_s) == {name: now for name, now in expected.items() if now}


@pytest.mark.parametrize(
    ("num_decodes", "now_s", "step_s", "is_held"),
    [
        (25, 0.583, 0.02, True),
        (25, 0.584, 0.02, False),
        (25, 0.055, 0.005, True),
        (25, 0.056, 0.005, False),
        (24, 0.001, 0.02, False),
    ],
    ids=["four steps", "not longer", "50 times step_ms", "not longer than that", "not for less than an eighth"],
)
def test_the_entries_that_prefills_see_are_in_the_time_of_their_steps(num_decodes, now_s, step_s, is_held):
    """A step of 64 rows takes 64 ms, and up to 131 ms more for the entries that they see."""
    limits = StepLimits(max_tokens=64, max_calls=32, min_chunk=8, step_s=step_s)
    calls = [*decodes(num_decodes, begun_s=-0.05), Call("far", 40, length=1000), Call("near", 40)]
    assert ("d0" not in Steps(limits, new_cost(pair_us=2)).plan(calls, now_s)) == is_held


def test_a_burst_does_not_hold_back_an_account_that_had_decodes_shortly_before():
    steps, burst = Steps(), [Call("d", 1), *prefills(5, 40)]
    assert steps.plan([*burst, Call("o", 1, user=1)])["p0"] == 18
    rows = [steps.plan(burst)["p0"] for _ in range(8)]
    assert rows == [19] * 7 + [40], "it may think for seven plans"


def is_planned(name, calls, now_s):
    return name in Steps().plan(calls, now_s)


def test_a_call_rises_in_priority_while_it_waits_to_those_that_are_there_and_not_above():
    now_s, patient = 200 / AGING_PER_S + 1, Call("patient", 1, priority=-100)
    crowd = decodes(6, priority=100, since_s=now_s)
    assert is_planned("patient", [*crowd, patient], now_s)
    assert not is_planned("patient", [*crowd, replace(patient, since_s=now_s - 3)], now_s)
    with_deadlines = decodes(4, since_s=3, deadline_s=8)
    assert not is_planned("old", [*with_deadlines, Call("old", 1)], 4), "its level is theirs"
    due = Call("due", 1, since_s=3.9, deadline_s=9)
    assert is_planned("due", [*decodes(4, since_s=0), due], 4), "equal ones differ in nothing, however long they wait"


def test_a_call_without_deadline_is_due_when_it_has_waited_long():
    for now_s, is_due in ((PATIENCE_S - 1, False), (PATIENCE_S + 1, True)):
        calls = [*decodes(4, since_s=now_s - 0.1, deadline_s=now_s + 0.1), Call("patient", 1)]
        assert is_planned("patient", calls, now_s) == is_due
    later = [*decodes(4, since_s=1), Call("patient", 1, deadline_s=3600)]
    assert is_planned("patient", later, PATIENCE_S + 2), "a deadline far away is no worse than none"


def test_rows_go_to_the_account_that_had_less():
    steps, calls = Steps(), [Call("long", 1000), Call("short", 10, user=1)]
    assert steps.plan(calls[:1]) == {"long": 64}
    assert steps.plan(calls) == {"short": 10, "long": 54}


def served(steps, calls, num_steps, step_s=0.01):
    """Entries of each call when all of them begin anew whenever they are complete."""
    counts, left = Counter[str](), [call.left for call in calls]
    for step in range(num_steps):
        plan = steps.plan([replace(call, left=count) for call, count in zip(calls, left, strict=True)], step * step_s)
        counts.update(plan)
        left = [count - plan.get(call.name, 0) or call.left for call, count in zip(calls, left, strict=True)]
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("left", [1, 500])
def test_service_is_as_the_weights(left):
    steps = Steps(weights={(0,): 1, (1,): 3, (1, 0): 1, (1, 1): 2})
    calls = [
        Call(f"{user}{account} {index}", left, user=user, account=account)
        for user, account in ((0, 0), (1, 0), (1, 1))
        for index in range(20)
    ]
    counts = Counter[str]()
    for name, count in served(steps, calls, 600).items():
        counts[name[:2]] += count
    assert counts["10"] / counts["00"] == pytest.approx(1, rel=0.05)
    assert counts["11"] / counts["00"] == pytest.approx(2, rel=0.05)


def test_who_was_idle_or_had_all_it_wanted_has_no_more_than_others_when_it_comes_back():
    always, eager, modest = Call("always", 10**6), Call("other", 10**6, user=1), Call("other", 2, user=1)
    for before in ([[always, eager], 10], [[always], 300]), ([[always, modest], 300],):
        steps = Steps()
        for calls, num_steps in before:
            served(steps, calls, num_steps)
        counts = served(steps, [always, eager], 100)
        assert counts["other"] / counts["always"] == pytest.approx(1, abs=0.05)


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


def test_what_nobody_lacked_is_no_debt():
    steps = Steps()
    for _ in range(5):
        steps.plan(decodes(4))
    assert steps.plan([*decodes(4), *OTHERS]) == HALF_AND_HALF


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
    candidate, share = np.zeros(1, CANDIDATE), np.zeros(1, SHARE)
    candidate["left"], candidate["deadline_ns"], share["last_plan"] = 7, 9, [[3, 4]]
    there = ffi.from_buffer("sym_candidate[]", candidate)[0]
    assert (there.left, there.deadline_ns) == (7, 9)
    assert list(ffi.from_buffer("sym_share[]", share)[0].last_plan) == [3, 4]


@pytest.mark.parametrize(("step_ms", "wait_ms"), [(1, 0.3), (10, 1.0), (100, 3.0)])
def test_the_wait_is_a_share_of_the_step_within_bounds(step_ms, wait_ms):
    wait = ffi.new("sym_wait *", {"share_percent": 10, "min_ns": 300_000, "max_ns": 3 * MS})
    assert lib.sym_policy_wait_ns(wait, step_ms * MS) == round(wait_ms * MS)
