#!/usr/bin/env python3
"""Processes that connect as fast as they can and never say a word: what is left for other users.

    .venv/bin/python scripts/bench/crowds/handshakes.py [--tree CHECKOUT] [--processes 8] [--seconds 3]

They are one user's (root starts this). Another user creates files on the mount meanwhile, a third one connects.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

from attacked import Attacked, arguments, attacked, processor

MAX_DESCRIPTORS = 4096
"""Of each process, the daemon among them."""
ATTACKER, NEIGHBOUR, CALLER = 65531, 65532, 65533

SILENT = """
import os, socket, sys
os.setresuid(*3 * (int(sys.argv[1]),))
kept = []
while True:
    try:
        each = socket.socket(socket.AF_UNIX)
        each.connect(os.environ["SYMPHONY_SOCKET"])
    except OSError:
        kept.clear()
    else:
        kept.append(each)
"""

CREATE = """
import collections, os, sys, time
os.setresuid(*3 * (int(sys.argv[1]),))
failures, number, longest_s = collections.Counter(), 0, 0.0
deadline_s = time.monotonic() + float(sys.argv[3])
while time.monotonic() < deadline_s:
    began_s = time.monotonic()
    try:
        with open(f"{sys.argv[2]}/{number % 100}.txt", "w") as file:
            file.write("x")
    except OSError as error:
        failures[error.strerror] += 1
    longest_s = max(longest_s, time.monotonic() - began_s)
    number += 1
told = ", ".join(f"{count} x {why}" for why, count in failures.items()) or "none failed"
print(f"{number} creates on the mount, the longest took {1000 * longest_s:.0f} ms: {told}")
sys.exit(bool(failures))
"""

CALL = """
import os, sys, time
import libsym as sym
os.setresuid(*3 * (int(sys.argv[1]),))
began_s = time.monotonic()
try:
    with sym.kv_create() as kv:
        sym.pred(kv, [1]).argmax()
    outcome = "a first pred()"
except sym.SymError as error:
    outcome = f"{type(error).__name__}: {error}"
print(f"{outcome} after {time.monotonic() - began_s:.2f} s")
sys.exit(outcome != "a first pred()")
"""


def num_descriptors(daemon: Attacked) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    if args.quick:
        args.processes, args.seconds = 2, 0.5
    print(processor())
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))
    with attacked(args, "--kv-memory", "64M") as daemon:
        ours = daemon.mount / "neighbour"
        ours.mkdir()
        os.chown(ours, NEIGHBOUR, NEIGHBOUR)
        before = most = num_descriptors(daemon)
        silent = [daemon.program(SILENT, str(ATTACKER)) for _ in range(args.processes)]
        try:
            deadline_s = time.monotonic() + args.seconds
            while time.monotonic() < deadline_s:
                most = max(most, num_descriptors(daemon))
                time.sleep(0.05)
            creating = daemon.program(CREATE, str(NEIGHBOUR), str(ours), str(args.seconds))
            calling = daemon.program(CALL, str(CALLER))
            outputs = [each.communicate(timeout=60)[0].strip() for each in (creating, calling)]
            most = max(most, num_descriptors(daemon))
        finally:
            for each in silent:
                each.kill()
                each.communicate()
        print(f"descriptors of the daemon: {before} before, {most} at most")
        print(f"another user: {outputs[0]}")
        print(f"a third one: {outputs[1]}")
    return creating.returncode or calling.returncode


if __name__ == "__main__":
    sys.exit(main())
