#!/usr/bin/env python3
"""Feeds hostile images to the import: headers, lengths, shapes, digests and contents that are made to do harm.

Each image must give one clear error, or a file with exactly the claimed content. No page may leak. An image must occupy
no more pages than its bytes can fill, and must change no other file. A run that fails prints its seed, which repeats
the failure.

    .venv/bin/python scripts/fuzz/image_bytes.py                ten million, on every core
    .venv/bin/python scripts/fuzz/image_bytes.py --count 1000000 --seed 7
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.kvfs.images.hostile import Fuzzer

BATCH, QUICK = 20_000, 3_000
"""Number of images of one seed. To repeat a failure, all images of its seed run again."""


def run_seed(seed: int, count: int) -> tuple[int, Counter[str], str]:
    """Run one batch. Return the number of accepted images, the messages of refusals, and the failure as text."""
    fuzzer = Fuzzer(seed)
    try:
        fuzzer.run(count)
    except Exception as failure:  # noqa: BLE001 - any exception is a finding
        return fuzzer.num_accepted, fuzzer.refusals, f"seed {seed}: {failure!r}"
    return fuzzer.num_accepted, fuzzer.refusals, ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Feed hostile images to the import.")
    parser.add_argument("--count", type=int, default=10_000_000, help="images (default ten million)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first batch; each next batch adds one")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} images")
    arguments = parser.parse_args()
    batch = QUICK if arguments.quick else BATCH
    num_batches = 1 if arguments.quick else -(-arguments.count // BATCH)
    refusals: Counter[str] = Counter()
    failures: list[str] = []
    num_accepted = 0
    began_s = time.monotonic()
    with ProcessPoolExecutor(arguments.jobs) as processes:
        seeds = range(arguments.seed, arguments.seed + num_batches)
        for done, (taken, messages, failure) in enumerate(processes.map(run_seed, seeds, repeat(batch)), 1):
            num_accepted += taken
            refusals += messages
            failures += [failure] if failure else []
            if sys.stderr.isatty() or done == num_batches:
                rate = done * batch / (time.monotonic() - began_s)
                print(f"\r{done * batch:,} images, {rate:,.0f}/s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{num_batches * batch:,} images: {num_accepted:,} were whole, {refusals.total():,} refused")
    for message, count in refusals.most_common():
        print(f"{count:>12,}  {message} …")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
