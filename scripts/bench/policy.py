#!/usr/bin/env python3
"""What one plan of the batch policy takes, in microseconds, by the number of calls that wait.

    .venv/bin/python scripts/bench/policy.py

Each call is a program of its own, in 8 accounts, with priorities from -3 to 3; seats and rows are short where there are
more than 256 calls or prefills among them. The call from Python is part of the time, and takes some 2 us.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from scheduler.batch.cost_model import CostModel
from scheduler.batch.policy import CANDIDATE, NO_DEADLINE, Limits, Policy, new_shares

NUM_ACCOUNTS, NUM_PLANS = 8, 500


def measure(count: int, prefill_share: float) -> tuple[float, float]:
    """The median time of a plan, and its comparisons."""
    rng = np.random.default_rng(0)
    users = range(1, 1 + NUM_ACCOUNTS)
    accounts = range(1 + NUM_ACCOUNTS, 1 + 2 * NUM_ACCOUNTS)
    shares = new_shares([-1, *[0] * NUM_ACCOUNTS, *users, *rng.choice(accounts, count).tolist()])
    calls = np.zeros(count, CANDIDATE)
    calls["deadline_ns"], calls["priority"] = NO_DEADLINE, rng.integers(-3, 4, count)
    calls["share"] = len(shares) - count + np.arange(count)
    calls["length"] = rng.integers(0, 4000, count)
    calls["left"] = np.where(rng.random(count) < prefill_share, rng.integers(2, 2000, count), 1)
    calls["is_decode"] = calls["left"] == 1
    policy, times = Policy(Limits(), CostModel("cpu", "bf16", None).coefficients), []
    for number in range(NUM_PLANS):
        began = time.perf_counter()
        policy.plan(calls, shares, number * 20_000_000)
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e6, policy.num_compared / NUM_PLANS


def main() -> None:
    print("| calls | decodes: us | comparisons | a fifth prefills: us | comparisons |\n|---|---|---|---|---|")
    for count in (1, 8, 64, 256, 300, 1024, 4096):
        (plain, few), (mixed, more) = measure(count, 0.0), measure(count, 0.2)
        print(f"| {count} | {plain:.1f} | {few:.0f} | {mixed:.1f} | {more:.0f} |")


if __name__ == "__main__":
    main()
