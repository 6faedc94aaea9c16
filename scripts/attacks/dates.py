#!/usr/bin/env python3
"""Dates beyond 64-bit nanoseconds, set by another user with `touch` and `cp -p`. The daemon must still commit.

    .venv/bin/python scripts/attacks/dates.py [--quick] [--tree CHECKOUT]

Needs root. The source file of `cp -p` is in /tmp, whose file system may be unable to store all dates.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from attacked import ATTACKER, VICTIM, Daemon, as_user, daemon, options, verdict

DATES = ["2300-01-01", "1600-01-01", "9999-12-31 23:59:59", "@9223372036854775807", "@-9223372036854775808"]
QUICK = DATES[:2]


def spoils(served: Daemon, words: list[object], name: str, date: str) -> list[str]:
    """Run one command of the attacker, then sync files of both users. Return the failures."""
    mine, victims = served.mount / name, served.mount / f"victim-{name}"
    done = as_user(ATTACKER, [*words, mine])
    if done.returncode:
        return [f"{' '.join(map(str, words))}: {done.stderr.strip()}"]
    as_user(VICTIM, ["touch", victims])
    for uid, file in ((VICTIM, victims), (ATTACKER, mine)):
        synced = as_user(uid, ["sync", file])
        if synced.returncode or not served.serves():
            end = "" if served.serves() else ", and the daemon is gone"
            return [f"{date} by {words[0]}: {synced.stderr.strip()}{end}"]
    return []


def attack(served: Daemon, directory: Path, dates: list[str]) -> list[str]:
    broken: list[str] = []
    for number, date in enumerate(dates):
        source = directory / f"source-{number}"
        source.touch()
        as_user(0, ["touch", "-d", date, source])
        ways: dict[str, list[object]] = {
            "touch": ["touch", "-d", date],
            "touch-a": ["touch", "-a", "-d", date],
            "cp": ["cp", "-p", source],
        }
        for how, words in ways.items():
            broken += spoils(served, words, f"{how}-{number}", date)
            if broken:
                return broken
    return broken


def main() -> int:
    args = options(__doc__)
    dates = QUICK if args.quick else DATES
    with tempfile.TemporaryDirectory() as directory, daemon("--kv-memory", "64M", tree=args.tree) as served:
        Path(directory).chmod(0o755)
        broken = attack(served, Path(directory), dates)
    return verdict(f"{len(dates)} dates by touch, touch -a and cp -p, syncs of both users after each", broken)


if __name__ == "__main__":
    sys.exit(main())
