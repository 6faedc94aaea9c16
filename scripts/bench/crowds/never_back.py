#!/usr/bin/env python3
"""Threads of one user that come back once and never again, beside another user's plain loops.

    .venv/bin/python scripts/bench/crowds/never_back.py [--tree CHECKOUT] [--streams 8] [--rounds 5] [--seconds 3]

A step waits for threads that usually come back. Those that `never` do make as many calls as it takes to be expected,
and end; new threads follow. In turns the other user's loops run beside as many `plain` loops of the first user, and
beside threads that call `once`: these fork and close as often, and no step expects them. Needs root, to be two users.
"""

from __future__ import annotations

import argparse
import json
import statistics

from attacked import Attacked, arguments, attacked, processor

_PROGRAM = """
import json, os, sys, threading, time
import libsym as sym
uid, num, way, seconds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
os.setresuid(uid, uid, uid)
with sym.kv_create() as base:
    sym.kv_write(base, list(range(1, 33)))
    print("ready", flush=True)
    sys.stdin.readline()
    until_s, times = time.monotonic() + seconds, []

    def calls(kv, most):
        for _ in range(most):
            began_s = time.monotonic()
            if began_s > until_s:
                break
            sym.pred(kv, [5]).argmax()
            times.append(time.monotonic() - began_s)

    def plain():
        while time.monotonic() < until_s:
            with base.fork() as kv:
                calls(kv, 100)

    def by_new_threads(num_threads, num_calls):
        while time.monotonic() < until_s:
            with base.fork() as kv:
                for _ in range(num_threads):
                    thread = threading.Thread(target=calls, args=(kv, num_calls))
                    thread.start()
                    thread.join()

    ways = {"plain": plain, "once": lambda: by_new_threads(3, 1), "never": lambda: by_new_threads(1, 3)}
    threads = [threading.Thread(target=ways[way]) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(json.dumps(times))
"""
WAYS = ("plain", "once", "never")


def turn(daemon: Attacked, args: argparse.Namespace, way: str) -> tuple[list[float], list[float]]:
    """Times of the other user's calls, and of the first one's."""
    programs = [
        daemon.program(_PROGRAM, str(uid), str(args.streams), what, str(args.seconds))
        for uid, what in ((12002, "plain"), (12001, way))
    ]
    for program in programs:
        assert program.stdout is not None
        if program.stdout.readline() != "ready\n":
            raise SystemExit("a program of the crowd did not start: see above")
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("begin\n")
        program.stdin.flush()
    outputs = [program.communicate(timeout=60)[0] for program in programs]
    if any(program.returncode for program in programs):
        raise SystemExit("a program of the crowd failed: see above")
    mine, theirs = (json.loads(output) for output in outputs)
    return mine, theirs


def p99_ms(times_s: list[float]) -> float:
    return 1e3 * sorted(times_s)[int(0.99 * (len(times_s) - 1))]


def main() -> None:
    parser = arguments(__doc__, model="smollm2")
    parser.add_argument("--streams", type=int, default=8, help="of each user")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    args = parser.parse_args()
    if args.quick:
        args.model, args.streams, args.rounds, args.seconds = "tiny", 2, 1, 0.5
    found: dict[str, list[tuple[list[float], list[float]]]] = {way: [] for way in WAYS}
    with attacked(args) as daemon:
        for number in range(args.rounds):
            for way in WAYS[:: 1 if number % 2 else -1]:
                found[way].append(turn(daemon, args, way))
    print(f"{processor()}; {args.model}; {args.streams} loops of a user beside as many threads of another")
    for way, turns in found.items():
        rates = [
            statistics.median(len(times) / args.seconds for times in column) for column in zip(*turns, strict=True)
        ]
        worst_ms = statistics.median(p99_ms(mine) for mine, _ in turns)
        text = "{:6} the loops get {:.1f} calls/s (p99 {:.1f} ms), the other threads {:.1f}"
        print(text.format(way, rates[0], worst_ms, rates[1]))
    text = "beside threads that never come back the loops get {:.3f} of that beside {}"
    for way, who in (("plain", "plain loops"), ("once", "threads that nobody expects")):
        ratios = [len(never[0]) / len(other[0]) for other, never in zip(found[way], found["never"], strict=True)]
        print(text.format(statistics.median(ratios), who))


if __name__ == "__main__":
    main()
