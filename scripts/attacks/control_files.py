#!/usr/bin/env python3
"""Control files: one user opens `.symphony/metrics` as often as possible, and reads one byte of each open file.

    .venv/bin/python scripts/attacks/control_files.py [--quick] [--tree CHECKOUT]

An open file must cost the daemon little memory, and the call that opens it little CPU time. Other readers must still
get the whole file. Needs root.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from attacked import ATTACKER, VICTIM, Daemon, as_user, daemon, memory_bytes, options, running_as, verdict

MOST_BYTES, MOST_MS = 4096, 1.5
"""Largest memory and CPU time of one open(). An early version built the document of 15 KB three times, and kept one
copy.
"""
OPENS, QUICK_OPENS = 15_000, 4000

OPEN = """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    refused = 0
    for _ in range(int(sys.argv[2])):
        descriptor = os.open(sys.argv[1], os.O_RDONLY)
        try:
            os.read(descriptor, 1)
        except OSError as error:
            assert error.errno == errno.EDQUOT
            refused += 1
    print(refused, flush=True)
    sys.stdin.read()
"""
READ = "assert open(sys.argv[1], 'rb').read(100) and open(sys.argv[1]).read().endswith('\\n')"


def main() -> int:
    args = options(__doc__)
    opens = QUICK_OPENS if args.quick else OPENS
    broken = []
    with daemon("--kv-memory", "64M", tree=args.tree) as served:
        path = served.mount / ".symphony/metrics"
        memory, worked_ms = float(memory_bytes(served)), cpu_ms(served)
        with running_as(ATTACKER, OPEN, path, opens, served=served) as process:
            assert process.stdout is not None
            assert process.stdout.readline(), "the attacker could not open as many"
            memory, worked_ms = (memory_bytes(served) - memory) / opens, (cpu_ms(served) - worked_ms) / opens
            read = as_user(VICTIM, READ, path, served=served)
            if read.returncode:
                broken.append(f"another user can't read it: {read.stderr}")
    costs = f"{memory:,.0f} bytes and {worked_ms:.2f} ms"
    if memory > MOST_BYTES or worked_ms > MOST_MS:
        broken.append(f"each of {opens} opens costs {costs}")
    return verdict(f"{opens} opens of a control file cost {costs} each", broken)


def cpu_ms(served: Daemon) -> float:
    """Return the daemon's CPU time in milliseconds."""
    fields = Path(f"/proc/{served.pid}/stat").read_bytes().rpartition(b")")[2].split()
    return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
