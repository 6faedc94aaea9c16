#!/usr/bin/env python3
"""What attacks on the sandbox get, without one and in one, and what bombs in it do to others.

    .venv/bin/python scripts/bench/escapes.py [--user UID] [--json] [--bombs | --attacks]

Starts a daemon of its own with the tiny model. Needs root, to be several users. The attacks are those of the tests
(tests/symphony/escapes/programs), one line each: what it got without a sandbox, what became of it in one. Those that
would harm the machine are tried in a sandbox alone.

A bomb is a program that takes all that it can get, and is ended after seconds. A program of another user calls pred()
meanwhile: its p99 before, while, and how often the first the second is. The aim is less than twice. The first of them,
`busy`, is none: two processes that compute, which any user may run on a machine of two processors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from scripts.bench.launches import processor  # noqa: E402 - the path comes first
from tests.symphony.escapes.bombs import BOMBS, explode, neighbour  # noqa: E402 - the path comes first
from tests.symphony.escapes.house import NONE, STANDARD, House, opened_house, table  # noqa: E402

VICTIM, BOMBER = 2001, 2002
SECONDS = 3.0


def attacks(house: House, uid: int) -> list[dict[str, Any]]:
    """A row for each attack."""
    rows = table()
    user = house.user(uid)
    controls = user.tries(NONE, *(row["name"] for row in rows if row["no_control"] is None))
    inside = user.tries(STANDARD, *(row["name"] for row in rows))
    return [
        {
            "attack": row["name"],
            "tries": row["tries"],
            "without": said(controls[row["name"]]) if row["name"] in controls else f"not tried: {row['no_control']}",
            "in the sandbox": said(inside[row["name"]]),
            "blocked": inside[row["name"]]["got"] is None and "broken" not in inside[row["name"]],
        }
        for row in rows
    ]


def said(row: dict[str, Any]) -> str:
    return str(row["got"] if row["got"] is not None else row.get("broken") or row["refused"])


def bombs(house: House) -> list[dict[str, Any]]:
    """A row for each bomb, with the p99 of another user's program."""
    found = []
    with neighbour(house.user(VICTIM)) as victim:
        bomber = house.user(BOMBER)
        explode(bomber, BOMBS[0])  # its launcher is there
        for bomb in BOMBS:
            victim.begin(SECONDS)
            before = victim.milliseconds()
            victim.begin(SECONDS)
            ended = explode(bomber, bomb)
            during = victim.milliseconds()
            found.append({"bomb": bomb.title, **ended, "before": before, "while": during, "lives": is_alive(house)})
    return found


def is_alive(house: House) -> bool:
    return house.daemon.process.poll() is None


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    print(f"processor: {processor()}\n")
    for row in found.get("attacks", []):
        verdict = "blocked" if row["blocked"] else "NOT BLOCKED"
        print(
            f"{row['attack']:28} {verdict:12} without: {row['without'][:50]!r:54} in it: {row['in the sandbox'][:60]!r}"
        )
    for row in found.get("bombs", []):
        before, during = row["before"]["p99"], row["while"]["p99"]
        times = f"p99 {before:6.2f} ms before, {during:6.2f} ms while: {during / before:.1f} times"
        print(f"{row['bomb']:34} ended with {row['status']:3}, got {str(row['got'])[:40]:42} {times}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--user", type=int, default=0, help="whose programs attack (default: root's)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--attacks", action="store_true", help="these alone")
    parser.add_argument("--bombs", action="store_true", help="these alone")
    args = parser.parse_args()
    if os.getuid() != 0:
        parser.error("only root can be several users")
    both = args.attacks == args.bombs
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="symphony-", dir="/var/lib") as directory,
        opened_house(Path(directory)) as house,
    ):
        if args.attacks or both:
            found["attacks"] = attacks(house, args.user)
        if args.bombs or both:
            found["bombs"] = bombs(house)
    print(json.dumps(found, indent=2)) if args.json else show(found)
    return 0 if all(row["blocked"] for row in found.get("attacks", [])) else 1


if __name__ == "__main__":
    raise SystemExit(main())
