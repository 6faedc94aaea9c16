"""Differences between two looks at a daemon: rates, quantiles, and numbers in readable form."""

from typing import Any

import pytest

from symphony.views.rates import Rates, human_count, human_time, quantile
from symphony.views.reports import human_uptime
from symphony.views.watching import rate_lines

BOUNDS_S = (0.001, 0.002, 0.004)


def info(uptime_s: float, nums: list[int], **numbers: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"pid": 7, "uptime_s": uptime_s, "time_bounds_s": BOUNDS_S}
    found |= dict.fromkeys(("num_steps", "num_tokens", "num_prefill_tokens", "num_calls_in_steps", "step_s"), 0)
    found |= {name: {"nums": nums} for name in ("step_times", "stretch_times", "wait_times")}
    return found | numbers


@pytest.mark.parametrize(
    ("nums", "part", "expected"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([10, 0, 0, 0], 0.5, 0.0005),
        ([0, 10, 0, 0], 0.5, 0.0015),
        ([5, 5, 0, 0], 0.5, 0.001),
        ([98, 0, 2, 0], 0.99, 0.003),
        ([0, 0, 1, 99], 0.99, 0.004),
    ],
)
def test_a_quantile_lies_in_its_bucket_where_those_of_it_are_spread_evenly(nums, part, expected):
    assert quantile(BOUNDS_S, nums, part) == (None if expected is None else pytest.approx(expected))


def test_rates_are_of_what_was_done_in_between_and_two_daemons_or_one_moment_have_none():
    before = info(10.0, [5, 1, 0, 0], num_steps=100, num_tokens=1000)
    grown = {"num_steps": 300, "num_tokens": 2000, "num_prefill_tokens": 400, "num_calls_in_steps": 500, "step_s": 1.5}
    rates = Rates.between(before, info(12.0, [5, 11, 0, 0], **grown))
    assert rates is not None
    assert (rates.steps_per_s, rates.tokens_per_s, rates.prefill_per_s, rates.calls_per_s) == (100, 500, 200, 5)
    assert (rates.calls_a_step, rates.rows_a_step, rates.busy) == (2.5, 5, 0.75)
    assert rates.steps.p50_s == pytest.approx(0.0015), "the five before are not counted"
    assert rate_lines(rates)[1] == "         100 steps/s of 2.5 calls, 75 % of the time"
    assert Rates.between(info(10.0, [0] * 4), info(11.0, [0] * 4, pid=8)) is None
    assert Rates.between(info(10.0, [0] * 4), info(10.0, [0] * 4)) is None


def test_numbers_are_short_and_round_to_the_next_unit():
    assert [human_count(each) for each in (0, 9999, 9999.6, 56_700, 999_600, 1e9)] == [
        *("0", "9999", "10.0k", "56.7k", "1.0M", "1.0G")
    ]
    times = [None, 0.00043, 0.0009996, 0.0123, 0.00999, 0.9996, 75.3, 1234.0]
    assert [human_time(each) for each in times] == [
        *("-", "430 µs", "1.00 ms", "12.3 ms", "9.99 ms", "1.00 s", "75.3 s", "1234 s")
    ]
    assert [human_uptime(each) for each in (5.9, 185, 7385, 5 * 86400 + 7385)] == [
        *("5 s", "3:05", "2:03:05", "5 d 2:03:05")
    ]
