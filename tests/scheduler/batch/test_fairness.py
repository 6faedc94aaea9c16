"""Waiting times under random loads, on a machine without a model.

`Machine` checks each plan: all decodes go while they have seats or are held for a burst within its bounds, a prefill
that waits has rows, nothing is withheld, and no call waits for longer than `policy.c` says. scripts/soak/fairness.py
runs the same check for any length of time.
"""

import pytest

from tests.scheduler.random_loads import burst_load, random_load, stubborn_load


@pytest.mark.slow
@pytest.mark.parametrize(("load", "num_loads"), [(random_load, 120), (stubborn_load, 8), (burst_load, 60)])
def test_no_call_waits_for_longer_than_is_stated(load, num_loads):
    num_held = 0
    for seed in range(num_loads):
        try:
            num_held += load(seed).num_held
        except* AssertionError as error:
            raise AssertionError(f"{load.__name__}({seed})") from error
    assert num_held or load is not burst_load
