#!/usr/bin/env python3
"""Measure one user's calls of three tokens while another user decodes in more loops than a step has seats.

    .venv/bin/python scripts/bench/crowd.py [--generations 600] [--priority 100] [--calls 10] [--tree CHECKOUT]

The aim: the daemon answers each of these calls within a few steps, for any priority of the loops.
"""

from __future__ import annotations

import statistics
import sys

from harness import ROOT, arguments, processor, read_line, served

CROWD = """
import os, sys
import libsym as sym
os.setresuid(12001, 12001, 12001)
count, priority, limit = map(int, sys.argv[1:])
kvs = [sym.kv_create() for _ in range(count)]
prompt = sym.tokenize("Once upon a time")
going = [sym.generate(kv, prompt, max_tokens=limit, stop_at_end=False, priority=priority) for kv in kvs]
for generation in going[:256]:
    next(generation)
print("decoding", flush=True)
for generation in going:
    for token in generation:
        pass
"""

OTHER = """
import os, sys, time
import libsym as sym
os.setresuid(12002, 12002, 12002)
for _ in range(int(sys.argv[1])):
    with sym.kv_create() as kv:
        began_s = time.perf_counter()
        sym.pred(kv, [11, 12, 13])
        print(time.perf_counter() - began_s, sym.daemon_stat()["waiting_calls"], flush=True)
"""


def main() -> int | str:
    sizes = {"generations": 600, "priority": 100, "calls": 10, "tokens": (40, "that each generation goes on for")}
    args = arguments(__doc__, tree=ROOT, model="smollm2", quick=False, **sizes).parse_args()
    if args.quick:
        args.model, args.generations, args.calls, args.tokens = "tiny", 40, 100, 2000
    with (
        served(args.model, "--precision", "int8", tree=args.tree) as daemon,
        daemon.program(CROWD, args.generations, args.priority, args.tokens) as crowd,
    ):
        assert read_line(crowd) == "decoding"
        with daemon.program(OTHER, args.calls) as other:
            assert other.stdout is not None
            lines = [line.split() for line in other.stdout]
        crowd.kill()
    latencies_s = [float(seconds) for seconds, _ in lines]
    print(f"{processor()}; {args.model}, int8")
    print(f"{args.generations} generations of one user with priority {args.priority}; calls of another user, seconds:")
    print("  " + " ".join(f"{seconds:.4f}" for seconds in latencies_s))
    print(f"  median {statistics.median(latencies_s):.4f}, worst {max(latencies_s):.4f}")
    print("  calls under way after each: " + " ".join(waiting for _, waiting in lines))
    return 0 if lines[-1][1] != "0" else "the crowd was over before the calls were"


if __name__ == "__main__":
    sys.exit(main())
