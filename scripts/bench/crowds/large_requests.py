#!/usr/bin/env python3
"""Requests that wait with a payload of 1 MB each: what the daemon's memory comes to, and goes back to.

    .venv/bin/python scripts/bench/crowds/large_requests.py [--tree CHECKOUT]

One connection has a thousand locks under way, with payloads that mean nothing, and makes 200 small `pred()`s;
another has a thousand `pred()`s with masks of 1 MB under way, behind a generation. Then they go.
"""

from __future__ import annotations

import time

from attacked import Attacked, arguments, attacked, processor

PAYLOAD_BYTES = 1_000_000

HEAD = """
import collections, struct, sys
import libsym as sym
from libsym.abi import MASKED, ROWS_LAST, Op
try:
    from libsym.channel.process import process
    from libsym.channel.scripts import Call
except ModuleNotFoundError:  # a checkout from before these files were moved
    from libsym.calls import Call
    from libsym.client import process
num_bytes, refused, waiting = int(sys.argv[1]), collections.Counter(), []
channel = process.channel()

def start(request):
    stream = channel.stream(request)
    stream.start()
    waiting.append(stream)

def answer_is_there():
    sym.model_info()  # by then the daemon has looked at what was sent before
    return "all are under way"
"""

LOCKS = (
    HEAD
    + """
kv, other = sym.kv_create("locked.kv"), sym.kv_open("locked.kv")
sym.kv_lock(other)
for number in range(1000):
    start(Call(Op.KV_LOCK, handle=kv.handle, payload=bytes(num_bytes)))
for number in range(200):
    sym.pred(kv, [number % 100]).argmax()
print(answer_is_there(), flush=True)
sys.stdin.read()
"""
)

PREDS = (
    HEAD
    + """
kv = sym.kv_create()
words = num_bytes // 4 - 3
mask = struct.pack("=i", 1) + struct.pack("=II", 1, 32 * words) + bytes(4 * words)
generation = sym.generate(kv, [1], stop_at_end=False, max_tokens=100000)
next(iter(generation))
for number in range(1000):
    start(Call(Op.PRED, flags=ROWS_LAST | MASKED, handle=kv.handle, args=(1, 0, 0, 0), payload=mask))
print(answer_is_there(), flush=True)
sys.stdin.read()
"""
)


def megabytes(daemon: Attacked) -> str:
    return f"{daemon.resident_bytes() / 1e6:.0f} MB"


def main() -> None:
    args = arguments(__doc__, model="smollm2").parse_args()
    if args.quick:
        args.model = "tiny"
    print(processor())
    with attacked(args, "--kv-memory", "512M") as daemon:
        for what, source in (("locks", LOCKS), ("pred()s", PREDS)):
            before = megabytes(daemon)
            program = daemon.program(source, str(PAYLOAD_BYTES))
            assert program.stdout is not None
            assert program.stdout.readline(), "the program failed"
            during = megabytes(daemon)
            program.kill()
            program.communicate()
            time.sleep(1)  # the daemon notices
            print(f"1,000 {what}: {before} resident before, {during} with them under way, {megabytes(daemon)} after")


if __name__ == "__main__":
    main()
