#!/usr/bin/env python3
"""Run random loads through the policy, without a model. No account may wait longer than `policy.c` promises.

    .venv/bin/python scripts/soak/fairness.py --loads 100000 [--first 0] [--steps 60] [--processes 2]

A load that breaks a promise is printed with its number; `--first NUMBER --loads 1` repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scheduler.random_loads import burst_load, random_load, stubborn_load

AT_ONCE = 100
STUBBORN_EVERY = 10
"""In each tenth load, all accounts always want everything. Such a load is ten times as long as others."""
BURST_EVERY = 3
"""In each third load, crowds of one account arrive together."""


def run(first: int, count: int, num_steps: int) -> tuple[int, list[str]]:
    """Run `count` loads. Return the number of plans made, and the failures."""
    num_plans, wrong = 0, []
    for seed in range(first, first + count):
        load, length = (burst_load if seed % BURST_EVERY == 0 else random_load), num_steps
        if seed % STUBBORN_EVERY == 0:
            load, length = stubborn_load, 10 * num_steps
        try:
            num_plans += load(seed, length).num_plans
        except BaseExceptionGroup:
            wrong.append(f"{load.__name__}({seed}, {length}):\n{traceback.format_exc()}")
    return num_plans, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--loads", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=60, help="of each load; loads of the stubborn kind have ten times as many"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="ten loads")
    options = parser.parse_args()
    if options.quick:
        options.loads = STUBBORN_EVERY
    began, num_plans, wrong = time.perf_counter(), 0, []
    firsts = range(options.first, options.first + options.loads, AT_ONCE)
    counts = [min(AT_ONCE, options.first + options.loads - first) for first in firsts]
    with ProcessPoolExecutor(options.processes) as pool:
        for plans, errors in pool.map(run, firsts, counts, [options.steps] * len(counts)):
            num_plans += plans
            wrong += errors
            for error in errors:
                print(error, file=sys.stderr, flush=True)
    print(
        f"{options.loads} loads, {num_plans} plans in {time.perf_counter() - began:.1f} s: {len(wrong)} broke a promise"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
