#!/usr/bin/env python3
"""Stat loops of one user beside another user's `stat`, while the model computes: only then does the mount keep a pace.

    .venv/bin/python scripts/bench/crowds/stats.py [--tree OTHER_CHECKOUT] [--loops 8] [--seconds 6]

Prints what a stat takes the victim, who makes one every 20 ms, and one who makes them without a pause; alone and beside
the loops; and how many the loops get. Needs root, to be several users.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attacked import Attacked, arguments, attacked, processor

ATTACKER, VICTIM = 4001, 4002
PAUSE_S = 0.02

_COMPUTES = """
import libsym as sym
print("computing", flush=True)
while True:
    with sym.kv_create() as kv:
        for _ in sym.generate(kv, [1, 2, 3], max_tokens=200):
            pass
"""

_STATS = """
import json, os, sys, time
uid, path, seconds, pause_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
os.setresuid(uid, uid, uid)
times, end = [], time.perf_counter() + seconds
while time.perf_counter() < end:
    began = time.perf_counter()
    os.stat(path)
    times.append(time.perf_counter() - began)
    time.sleep(pause_s) if pause_s else None
print(json.dumps(times))
"""


def stats(daemon: Attacked, uid: int, path: Path, seconds: float, pause_s: float = 0.0) -> subprocess.Popen[str]:
    """A process that stats one path again and again, and then prints what each time took."""
    return daemon.program(_STATS, str(uid), str(path), str(seconds), str(pause_s))


def times_of(process: subprocess.Popen[str]) -> list[float]:
    out, _ = process.communicate(timeout=120)
    found: list[float] = json.loads(out)
    return found


@contextmanager
def computing(daemon: Attacked) -> Iterator[None]:
    with daemon.program(_COMPUTES) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "computing\n"
            yield
        finally:
            program.kill()


def measure(daemon: Attacked, loops: int, seconds: float, pause_s: float) -> tuple[list[float], list[float]]:
    """What each stat took the victim, and how many a second each loop got."""
    attacks = [stats(daemon, ATTACKER, daemon.mount / "theirs", seconds + 2) for _ in range(loops)]
    time.sleep(1.0)  # let them use up the burst
    mine = times_of(stats(daemon, VICTIM, daemon.mount / "mine", seconds, pause_s))
    return mine, [len(times_of(process)) / (seconds + 2) for process in attacks]


def shown(times_s: list[float]) -> str:
    ordered = sorted(times_s)
    p50, p99 = (1e3 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    return f"p50 {p50:7.2f} ms, p99 {p99:7.2f} ms, {len(ordered)} stats"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement (default 6)")
    args = parser.parse_args()
    if args.quick:
        args.loops, args.seconds = 2, 0.5
    print(processor())
    with ExitStack() as stack:
        daemon = stack.enter_context(attacked(args))
        for name in ("mine", "theirs"):
            (daemon.mount / name).touch()
        stack.enter_context(computing(daemon))
        for what, pause_s in ((f"a stat each {1e3 * PAUSE_S:.0f} ms", PAUSE_S), ("stats without a pause", 0.0)):
            for loops in (0, args.loops):
                mine, theirs = measure(daemon, loops, args.seconds, pause_s)
                beside = f"beside {loops} loops of another" if loops else "alone"
                rate = f"; the loops: {sum(theirs):.0f}/s" if loops else ""
                print(f"{what:22} {beside:27}: {shown(mine)}{rate}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
