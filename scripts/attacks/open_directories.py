#!/usr/bin/env python3
"""Open directories: one user opens a directory of many names as often as possible, and reads one name by each
descriptor.

    .venv/bin/python scripts/attacks/open_directories.py [--quick] [--tree CHECKOUT]

The daemon must not keep a copy of the names for each descriptor. Two directories are tried: the directory itself, and
its mirror among the texts of `.symphony`. Needs root.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attacked import ATTACKER, Daemon, as_user, daemon, memory_bytes, options, running_as, verdict

MOST_BYTES = 4096
"""Largest memory of the daemon for one descriptor."""
NAMES, OPENS = 40_000, 5000
QUICK_NAMES, QUICK_OPENS = 1000, 1000

MAKE = """
    os.mkdir(sys.argv[1])
    os.chdir(sys.argv[1])
    for number in range(int(sys.argv[2])):
        os.mkdir(f"{number:0200}")
"""
OPEN = """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept = []
    for _ in range(int(sys.argv[2])):
        kept.append(os.scandir(sys.argv[1]))
        next(kept[-1])
    print(len(kept), flush=True)
    sys.stdin.read()
"""


def main() -> int:
    args = options(__doc__)
    names, opens = (QUICK_NAMES, QUICK_OPENS) if args.quick else (NAMES, OPENS)
    broken, costs = [], []
    with daemon("--kv-memory", "64M", tree=args.tree) as served:
        made = as_user(ATTACKER, MAKE, served.mount / "many", names, timeout=600)
        if made.returncode:
            return verdict("", [f"the directory can't be made: {made.stderr}"])
        for path in (served.mount / "many", served.mount / ".symphony/text/many"):
            cost = opened_bytes(served, path, opens) / opens
            costs.append(f"{cost:,.0f}")
            if cost > MOST_BYTES:
                broken.append(f"each descriptor of {names} names costs {cost:,.0f} bytes ({path})")
    return verdict(f"{opens} descriptors of a directory of {names} names cost {' and '.join(costs)} bytes each", broken)


def opened_bytes(served: Daemon, path: Path, opens: int) -> int:
    """Return the memory that the daemon needs while a user has one directory open `opens` times."""
    before = memory_bytes(served)
    with running_as(ATTACKER, OPEN, path, opens, served=served) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "the attacker could not open as many"
        return memory_bytes(served) - before


if __name__ == "__main__":
    sys.exit(main())
