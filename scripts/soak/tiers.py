#!/usr/bin/env python3
"""Random operations on files, frames and slots, with far too little memory. No content may be lost.

Each state directory has several lives of a daemon. A life ends abruptly, or after all writes have drained. In every
fourth directory the disk sometimes fails, hangs or is full. After each life and before the next, all files are compared
with a model, bit for bit. If anything differs, the exit status is 1, and the seed of the directory is printed. Threads
are not deterministic, so repeat a seed several times: --seed SEED --operations 25000

Run with the repository's interpreter: .venv/bin/python scripts/soak/tiers.py --operations 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import trio

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.disk.recorder import Disk, available  # noqa: E402 - the path comes first
from tests.kvfs.durable.storm import Storm  # noqa: E402

OPERATIONS, QUICK = (25_000, 5_000), (1_000, 500)
"""Number of operations on a directory with a sound disk, and on a directory whose disk fails."""
LIVES = 5
FAILS_EACH = 4
"""Of this number of directories, one has a disk that fails."""


def directory(seed: int, num_operations: int, *, fails: bool) -> Storm:
    """Run all operations over one state directory."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=memory if memory.is_dir() else None) as base:
        if not fails:
            storm = Storm(Path(base) / "state", seed)
            trio.run(storm.lives, num_operations, LIVES)
            return storm
        with Disk(Path(base)) as disk:
            storm = Storm(disk.path / "state", seed, disk)
            trio.run(storm.lives, num_operations, LIVES)
            return storm


def innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first directory")
    parser.add_argument("--sound", action="store_true", help="only disks that do not fail")
    parser.add_argument(
        "--quick", action="store_true", help="a small directory on a sound disk, one on a disk that fails"
    )
    arguments = parser.parse_args()
    logging.disable()
    sizes, fails_each = (QUICK, 2) if arguments.quick else (OPERATIONS, FAILS_EACH)
    if arguments.quick:
        arguments.operations = sum(QUICK)
    has_faults = not (arguments.sound or available())
    counts, begun_s, num_done, num_failed, number = Counter[str](), time.monotonic(), 0, 0, 0
    while num_done < arguments.operations:
        seed, fails = arguments.seed + number, has_faults and number % fails_each == fails_each - 1
        size = min(sizes[fails], arguments.operations - num_done)
        number += 1
        num_done += size
        try:
            storm = directory(seed, size, fails=fails)
        except (AssertionError, ExceptionGroup) as error:
            num_failed += 1
            found = innermost(error)
            print(f"seed {seed}{', a disk that fails' if fails else ''}: {type(found).__name__}: {found}", flush=True)
            continue
        counts += storm.counts
        took_s = time.monotonic() - begun_s
        print(f"{num_done} operations, {num_done / took_s:.0f} a second, {num_failed} directories wrong", flush=True)
    print(", ".join(f"{name.lstrip('_')} {count}" for name, count in counts.most_common()))
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
