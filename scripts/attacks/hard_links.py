#!/usr/bin/env python3
"""Hard links, as many as one user can make, with and without a quota of files: the cost of a file with many names.

With a quota each name counts, and no user can add a name to another user's file. Without a quota, the script measures
the daemon's CPU time of each call on a file with many names, and on a file with one name.
"""

from __future__ import annotations

import sys

from attacked import ATTACKER, VICTIM, Program, daemon, options, program, verdict

LINKS = 200_000
CALLS, QUICK_CALLS = 100, 20
QUOTA = 6000
"""Quota of files. The short form makes this many names for a file, and skips the attack without a quota."""
MOST, SLACK_US = 2, 1000
"""A call on a file with many names may cost MOST times the same call on a file with one name, plus SLACK_US."""

WORK = """
    os.chdir(sys.argv[1])
    where = f"d{os.getuid()}"
    os.mkdir(where)
    os.chmod(where, 0o777)
    os.chdir(where)
    for name in ("one", "many"):
        with open(name, "w") as file:
            file.write("x")
        os.chmod(name, 0o666)

    def fail(name):
        try:
            os.setxattr(name, b"user.kv.tier", b"disk")
        except OSError as error:
            assert error.errno in (errno.ENOTSUP, errno.EINVAL), error

    def sync(name):
        with open(name, "r+") as file:
            os.utime(name)
            os.fsync(file.fileno())

    def move(name):
        os.rename(name, "moved")
        os.rename("moved", name)

    def link(name):
        os.link(name, "linked")
        os.unlink("linked")

    TARGETS = {"links": ("many", errno.EDQUOT), "stranger": ("../d4242/many", errno.EPERM)}
    print("ready", flush=True)
    for line in sys.stdin:
        what, count = line.split()
        if what in TARGETS:
            target, refusal = TARGETS[what]
            made = 0
            try:
                for number in range(int(count)):
                    os.link(target, f"{number:0200}")
                    made += 1
            except OSError as error:
                assert error.errno == refusal, error
            print(made, flush=True)
        elif what == "unlink":
            os.unlink(f"{0:0200}")
            print("done", flush=True)
        else:
            call, name = what.split(":")
            for _ in range(int(count)):
                globals()[call](name)
            print("done", flush=True)
"""


NAMES = ["fail", "sync", "move", "link"]


def costs_us(attacker: Program, file: str, calls: int) -> dict[str, float]:
    """Return the daemon's CPU time for each call on a file, in microseconds."""
    attacker.cost_us(f"sync:{file}", 1)  # commits the names
    return {each: attacker.cost_us(f"{each}:{file}", calls) for each in NAMES}


def main() -> int:
    args = options(__doc__)
    broken, links, calls = [], QUOTA, QUICK_CALLS if args.quick else CALLS
    with (
        daemon("--quota-files", QUOTA, tree=args.tree) as served,
        program(served, ATTACKER, WORK, served.mount) as attacker,
        program(served, VICTIM, WORK, served.mount) as stranger,
    ):
        one = costs_us(attacker, "one", calls)
        attacker.begin("links", 2 * QUOTA)
        if (made := int(attacker.wait())) >= QUOTA:
            broken.append(f"{made} hard links with a quota of {QUOTA} files")
        stranger.begin("stranger", 10)
        if made := int(stranger.wait()):
            broken.append(f"a stranger adds {made} names to a file, at its owner's cost")
        attacker.begin("unlink", 1)  # frees quota for the names that the calls make
        attacker.wait()
        many = costs_us(attacker, "many", calls)
    if not args.quick:
        links = LINKS
        with daemon(tree=args.tree) as served, program(served, ATTACKER, WORK, served.mount) as attacker:
            one = costs_us(attacker, "one", calls)
            attacker.begin("links", links)
            attacker.wait()
            many = costs_us(attacker, "many", calls)
    broken += [
        f"{each} costs {many[each]:.0f} us with {links} names, {one[each]:.0f} with one"
        for each in NAMES
        if many[each] > MOST * one[each] + SLACK_US
    ]
    costs = ", ".join(f"{each} {one[each]:.0f} to {many[each]:.0f}" for each in NAMES)
    return verdict(f"each name counts; from 1 to {links} names, us of a call: {costs}", broken)


if __name__ == "__main__":
    sys.exit(main())
