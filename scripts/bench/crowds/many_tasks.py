#!/usr/bin/env python3
"""Tasks of one program that each fork a file and make one `pred()`: how many get a distribution.

    .venv/bin/python scripts/bench/crowds/many_tasks.py [--tree CHECKOUT] [--model smollm2] [--tasks 1000]

A task looks at its row and drops it, so the program as a whole holds no row for longer than that: none may fail.
"""

from __future__ import annotations

import sys

from attacked import arguments, attacked, processor

PROGRAM = """
import asyncio, collections, sys, time
import libsym as sym
num_tasks = int(sys.argv[1])
failures = collections.Counter()

async def task(base, number):
    try:
        async with await sym.aio.kv_fork(base) as kv:
            dist = await sym.aio.pred(kv, [number % 200 + 1])
            return dist.argmax()
    except sym.SymError as error:
        failures[f"{type(error).__name__}: {error}"] += 1

async def main():
    base = await sym.aio.kv_create()
    await sym.aio.kv_write(base, list(range(1, 33)))
    began_s = time.monotonic()
    found = await asyncio.gather(*(task(base, number) for number in range(num_tasks)))
    took_s = time.monotonic() - began_s
    num_failed = sum(failures.values())
    print(f"{num_failed} of {num_tasks} failed in {took_s:.1f} s; {len(found) - found.count(None)} got a token")
    for failure, count in failures.most_common(3):
        print(f"  {count} x {failure}")

asyncio.run(main())
sys.exit(bool(failures))
"""


def main() -> None:
    parser = arguments(__doc__, model="smollm2")
    parser.add_argument("--tasks", type=int, help="how many: 1000, of a small crowd 500")
    args = parser.parse_args()
    if args.quick:
        args.model = "tiny"
    num_tasks = args.tasks or (500 if args.quick else 1000)
    print(processor())
    with attacked(args, "--kv-memory", "1G") as daemon:
        program = daemon.program(PROGRAM, str(num_tasks))
        output, _ = program.communicate(timeout=120)
        print(output, end="")
    sys.exit(program.returncode)


if __name__ == "__main__":
    main()
