#!/usr/bin/env python3
"""Run the attacks of scripts/attacks in turns, and report how long they held the main threads of their daemons.

Each attack starts its own daemons. At its end a daemon reports the longest times that a task held its main thread
without a break. During a hold, all other calls waited. The table lists the holds with the most CPU time, and their
tasks. If the CPU time of a hold is much less than its length, other processes used the cores. If an attack works, the
script prints its output, names the attack again at the end, and exits with status 1.

Run as root, with the repository's interpreter:
.venv/bin/python scripts/soak/attacks.py --minutes 60
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from heapq import nlargest
from pathlib import Path
from typing import Any

ATTACKS = Path(__file__).resolve().parents[1] / "attacks"
NUM_SHOWN = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", nargs="+", metavar="ATTACK", help="run these attacks alone")
    parser.add_argument("--quick", action="store_true", help="the short form of one attack, once")
    options = parser.parse_args()
    names = options.only or sorted(path.stem for path in ATTACKS.glob("*.py") if path.stem != "attacked")
    if options.quick:
        options.minutes, names = 0, options.only or ["metrics"]
    end_s = time.monotonic() + 60 * options.minutes
    num_made, worst = Counter[str](), list[tuple[float, float, str, str]]()
    num, num_long, worked = 0, 0, list[str]()
    with tempfile.TemporaryDirectory(prefix="attacks-") as directory:
        told = Path(directory) / "held"
        while not num_made or time.monotonic() < end_s:
            for name in names:
                command = [sys.executable, str(ATTACKS / f"{name}.py"), *["--quick"] * options.quick]
                environment = os.environ | {"SYMPHONY_ATTACKS_HELD": str(told)}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                print(f"{name:20} {(done.stdout.strip() or done.stderr.strip()).splitlines()[-1][:100]}", flush=True)
                num_made[name] += 1
                if done.returncode:
                    worked.append(name)
                    print(done.stdout + done.stderr, flush=True)
                if not told.exists():  # no daemon of the attack ended normally
                    continue
                held: list[dict[str, Any]] = [json.loads(line) for line in told.read_text().splitlines()]
                told.unlink()
                num += sum(each["num"] for each in held)
                num_long += sum(each["num_long"] for each in held)
                worst += [
                    (long["processor_s"], long["held_s"], name, long["task"]) for each in held for long in each["worst"]
                ]
                worst = nlargest(NUM_SHOWN, worst)
                if num_made and time.monotonic() > end_s:
                    break
    print(f"{sum(num_made.values())} attacks; held over 1 ms {num_long:,} of {num:,} times; those that took it most:")
    print("  held ms  processor ms  attack               task")
    for processor_s, held_s, name, task in worst:
        print(f"  {1000 * held_s:7.1f}  {1000 * processor_s:12.1f}  {name:20} {task}")
    if worked:
        print(f"these worked: {', '.join(worked)}")
    return bool(worked)


if __name__ == "__main__":
    sys.exit(main())
