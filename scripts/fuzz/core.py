#!/usr/bin/env python3
"""Random walks over tables, reservations, readers and accounts, in the core and in a plain Python model of it.

After each operation, all columns, counts and answers must be equal in both: see `Walk` in tests/kvfs/core/walk.py. A
walk that fails prints its seed, and the same seed repeats its operations.

    scripts/fuzz/core.py                              # 10,000,000 operations, on every core
    scripts/fuzz/core.py --operations 100000 --seed 7
    scripts/fuzz/core.py --quick                      # some seconds
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.kvfs.core.walk import Walk

EACH = 10_000
"""Operations of one walk."""


def walked(seed: int) -> int:
    """Run a walk. Return how many of its operations met a limit."""
    walk = Walk(seed)
    walk.run(EACH)
    return walk.num_refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + (2 if args.quick else -(-args.operations // EACH)))
    num_refused = 0
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        for seed, found in [(seed, workers.submit(walked, seed)) for seed in seeds]:
            if (error := found.exception()) is not None:
                workers.shutdown(cancel_futures=True)
                traceback.print_exception(error)
                sys.exit(f"FAILED seed {seed}")
            num_refused += found.result()
    print(f"{len(seeds) * EACH:,} operations agree with the model, {num_refused:,} of them were refused")


if __name__ == "__main__":
    main()
