#!/usr/bin/env python3
"""A million empty files: the daemon's cost of a file must not grow with the number of files.

    .venv/bin/python scripts/attacks/many_files.py [--quick] [--tree CHECKOUT]

A user makes the files in directories of ten thousand files each. Before and after that, the user makes, stats, syncs
and removes some other files. The daemon starts again with all files, and answers another user. Needs root.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from attacked import (
    ATTACKER,
    ROOT,
    VICTIM,
    Daemon,
    Program,
    as_user,
    daemon,
    memory_bytes,
    options,
    processor_us,
    program,
    verdict,
)

from kvfs.pages.holdings import WEIGHTS, Kind

FILES, QUICK_FILES = 1_000_000, 1_500
ASKED, QUICK_ASKED = 2_000, 100
"""Number of calls that are measured before and after the files are made."""
A_DIRECTORY = 10_000
MOST_TIMES = 2.0
"""Highest cost of a call beside all files, as a multiple of its cost beside few files."""
SLACK_US, QUICK_SLACK_US = 100, 1_000
"""Slack on a cost. With few calls, the daemon's other work weighs more."""
MOST_HELD_MS = 100
"""Longest CPU time that the main thread may take without a break. Python's garbage collector once took 3,650 ms."""
MOST_START_US = 500
"""Longest CPU time of a start, in microseconds for each file."""

MAKER = """
    os.makedirs(sys.argv[1])
    os.chdir(sys.argv[1])
    made = 0

    def make(count):
        global made
        for number in range(made, made + count):
            directory = f"d{number // 10_000}"
            if not os.path.isdir(directory):
                os.mkdir(directory)
            os.close(os.open(f"{directory}/{number}", os.O_CREAT | os.O_WRONLY, 0o600))
        made += count

    def flat(count):
        for number in range(count):
            os.close(os.open(f"flat{number}", os.O_CREAT | os.O_WRONLY, 0o600))

    def look(count):
        for number in range(count):
            os.stat(f"flat{number}")

    def sync(count):
        for number in range(count):
            descriptor = os.open(f"flat{number}", os.O_WRONLY)
            os.write(descriptor, b"x")
            os.fsync(descriptor)
            os.close(descriptor)

    def remove(count):
        for number in range(count):
            os.unlink(f"flat{number}")

    print("begun", flush=True)
    for line in sys.stdin:
        what, count = line.split()
        {"make": make, "flat": flat, "look": look, "sync": sync, "remove": remove}[what](int(float(count)))
        print("done", flush=True)
"""
PRED = """
    began_s = time.monotonic()
    with sym.kv_create() as kv:
        sym.pred(kv, [1, 2, 3])
    print(time.monotonic() - began_s)
"""


def costs(served: Daemon, maker: Program, asked: int) -> dict[str, float]:
    """Return the daemon's CPU time for each kind of call. A sync before the calls completes all earlier writes."""
    synced = as_user(0, [sys.executable, "-m", "symphony", "sync"], served=served, cwd=ROOT, timeout=300)
    assert synced.returncode == 0, synced.stderr
    return {
        what: maker.cost_us(what, count)
        for what, count in (("flat", asked), ("look", asked), ("sync", asked // 10), ("remove", asked))
    }


def main() -> int:
    args = options(__doc__)
    sizes = (QUICK_FILES, QUICK_ASKED, QUICK_SLACK_US) if args.quick else (FILES, ASKED, SLACK_US)
    number, asked, slack_us = sizes
    broken = []
    common = ("--kv-memory", "16M", "--quota-memory", 2 * (number + A_DIRECTORY) * WEIGHTS[Kind.FILE])
    with tempfile.TemporaryDirectory(prefix="attack-") as directory:
        state = Path(directory) / "state"
        with daemon(*common, "--state", state, tree=args.tree) as served:
            empty_us = processor_us(served.pid)
            with program(served, ATTACKER, MAKER, served.mount / "mine") as maker:
                few = costs(served, maker, asked)
                # Not earlier: the weights of the model can become a huge page shortly after the start.
                before = memory_bytes(served)
                made_us = maker.cost_us("make", number)
                many = costs(served, maker, asked)
            grown = (memory_bytes(served) - before) / number
            stat = as_user(0, [sys.executable, "-m", "symphony", "stat", "--json"], served=served, cwd=ROOT)
            worst = json.loads(stat.stdout)["held"]["worst"]
            held_ms = 1000 * max((each["processor_s"] for each in worst), default=0.0)
        with daemon(*common, "--state", state, tree=args.tree) as served:
            start_us = (processor_us(served.pid) - empty_us) / number
            pred = as_user(VICTIM, PRED, served=served)
            grown_again = (memory_bytes(served) - before) / number
            listed = as_user(ATTACKER, ["ls", served.mount / "mine/d0"], timeout=60)
            num_listed = len(listed.stdout.split())
            if pred.returncode or num_listed != min(number, A_DIRECTORY):
                broken.append(f"after a restart: {pred.stderr[-200:]} {listed.stderr[-200:]} {num_listed} files")
    table = ", ".join(f"{what} {few[what]:.0f} -> {many[what]:.0f} us" for what in few)
    broken += [
        f"{what} costs {many[what]:.0f} us among {number} files, and {few[what]:.0f} among few"
        for what in few
        if many[what] > MOST_TIMES * few[what] + slack_us
    ]
    if max(grown, grown_again) > WEIGHTS[Kind.FILE]:
        broken.append(f"a file takes {grown:.0f} bytes of memory, {grown_again:.0f} after a restart")
    if start_us > MOST_START_US:
        broken.append(f"a start takes {start_us:.0f} us for each file")
    if held_ms > MOST_HELD_MS:
        broken.append(f"the main thread was held for {held_ms:.0f} ms of CPU time")
    return verdict(
        f"{number} files at {made_us:.0f} us and {grown:.0f} bytes of memory each, {grown_again:.0f} after a start at "
        f"{start_us:.0f} us; of other files {table}; the main thread was held for {held_ms:.0f} ms at most",
        broken,
    )


if __name__ == "__main__":
    sys.exit(main())
