#!/usr/bin/env python3
"""Measure the ceiling of the daemon itself: rates of decodes and branches if a step of any size only sleeps.

    .venv/bin/python scripts/bench/ceiling.py [--before TREE] [--sleep-ms 0.2,1] [--rounds 5] [--quick] [--json]

Only the step of the daemon's decoder is replaced: see sleeping_daemon.py. Plain loops over `pred()` and loops that
branch (fork, `pred()`, close) run as threads of one process and as processes. At most sixteen processes run: 256
streams are sixteen processes of sixteen threads. Rows are named `STREAMS WAY, KIND, SLEEP`; branching.py runs them in
turns.

`step ms` is the time of a sleep, with the delay until the kernel ran the thread again. `main us` is the processor time
of the daemon's trio thread for each token, `steps us` that of its other threads, `client us` that of the programs. The
time of a thread includes its system calls. Rates also depend on the programs: on Python, and on the interpreter's lock
among the threads of a process.
"""

from __future__ import annotations

import json
from pathlib import Path

from branching import WAYS, Bench, asked, options, parsed, sides
from branching_programs import Asked

STREAMS = (1, 8, 64, 256)
MAX_PROCESSES = 16


def main() -> None:
    args = parsed(options(__doc__, "tiny", STREAMS, sleep_ms=("0.2,1", "how long a step takes")))
    sleeps_ms = args.sleep_ms.split(",")[: 1 if args.quick else None]
    daemon = Path(__file__).with_name("sleeping_daemon.py")
    cases: dict[str, tuple[Asked, int]] = {}
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
