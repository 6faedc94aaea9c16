#!/usr/bin/env python3
"""The daemon's own ceiling: how fast programs decode and branch where a step only sleeps, whatever it holds.

    .venv/bin/python scripts/bench/ceiling.py [--before TREE] [--sleep-ms 0.2,1] [--rounds 5] [--quick] [--json]

The daemon is the real one, but for the step of its decoder: see sleeping_daemon.py. Plain loops over `pred()` and loops
that branch (fork, `pred()`, close) run as threads of one process and as processes. There are sixteen processes at most:
256 streams are sixteen processes of sixteen threads. Rows say `STREAMS WAY, KIND, SLEEP`; branching.py runs them in
turns.

Columns: `step ms` is what a sleep took, with the delay until the kernel ran the thread again. `main us` is the
processor time of the daemon's trio thread for each token, `steps us` that of its other threads, `client us` that of the
programs; system calls of a thread are in its time. Rates have the programs' own time in them, too: Python, and its lock
among the threads of a process.
"""

from __future__ import annotations

import json
from pathlib import Path

from branching import WAYS, Bench, arguments, asked, parsed, sides

STREAMS = (1, 8, 64, 256)
MAX_PROCESSES = 16


def main() -> None:
    parser = arguments(__doc__, "tiny", STREAMS)
    parser.add_argument("--sleep-ms", default="0.2,1", help="how long a step takes")
    args = parsed(parser)
    sleeps_ms = args.sleep_ms.split(",")[: 1 if args.quick else None]
    daemon = Path(__file__).with_name("sleeping_daemon.py")
    cases = {}
    for num in args.streams:
        num_processes = max(each for each in range(1, MAX_PROCESSES + 1) if num % each == 0)
        for kind, count in (("threads", 1), ("processes", num_processes)):
            cases |= {f"{num} {way}, {kind}": (asked(args, way, num // count), count) for way in WAYS}
    with sides(args, {f"{sleep_ms} ms": (daemon, sleep_ms) for sleep_ms in sleeps_ms}) as found:
        bench = Bench(args, found)
        bench.beside_plain("ceiling", cases)
    for what, turns in bench.results["ceiling"].items():
        for sleep_ms in sleeps_ms:
            took_ms = min(turn["step_ms"] for turn in turns)
            if f", {sleep_ms} ms" in what and took_ms < float(sleep_ms):
                raise SystemExit(f"{what}: a step took {took_ms:.3f} ms, so the decoder does not sleep")
    if args.json:
        print(json.dumps(bench.results))


if __name__ == "__main__":
    main()
