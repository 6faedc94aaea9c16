#!/usr/bin/env python3
"""A tree too deep for any path: the cost of a call at its bottom, and its effect on another user's calls.

The daemon's CPU time for each call is compared with its CPU time for the same call at depth 1. Calls that fail cost
most, because their messages name a path.
"""

from __future__ import annotations

import sys

from attacked import ATTACKER, VICTIM, Program, daemon, options, program, verdict

DEPTH, QUICK_DEPTH = 100_000, 2_000
CALLS, QUICK_CALLS = 200, 40
TURNS, TRIES = 3, 3
MOST, SLACK_US = 3, 800
"""A call at the bottom may cost MOST times its cost at depth 1, plus SLACK_US for a path of 4,096 bytes."""

WORK = """
    def fail():
        try:
            os.setxattr(b".", b"user.kv.weight", b"1")
        except OSError as error:
            assert error.errno == errno.EINVAL, error
        else:
            raise AssertionError("a directory that is no domain has a weight")

    def sync():
        number = os.open(b".", os.O_RDONLY)
        os.fsync(number)
        os.close(number)

    def make_and_sync():
        os.mkdir(b"new")
        sync()
        os.rmdir(b"new")

    def move():
        os.rename(b"a/b", b"b")
        os.rename(b"b", b"a/b")

    def move_from_root():
        try:
            os.rename(sys.argv[1] + "/moved/sub", b"sub")
            os.rename(b"sub", sys.argv[1] + "/moved/sub")
        except OSError as error:
            assert error.errno == errno.ENAMETOOLONG, error

    os.mkdir(sys.argv[1])
    os.makedirs(sys.argv[1] + "/moved/sub/c")
    os.chdir(sys.argv[1])
    name, PLACES = b"d" * 255, []
    print("ready", flush=True)
    for line in sys.stdin:
        what, count = line.split()
        if what == "descend":
            for _ in range(int(count)):
                os.mkdir(name)
                os.chdir(name)
            os.makedirs(b"a/b/c", exist_ok=True)
            PLACES.append(os.open(b".", os.O_RDONLY))
        elif what == "at":
            os.fchdir(PLACES[int(count)])
        elif what == "threads":
            def many():
                end = time.monotonic() + float(count)
                while time.monotonic() < end:
                    fail()
            threads = [threading.Thread(target=many) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for _ in range(int(count)):
                globals()[what]()
        print("done", flush=True)
"""
PREDS = """
    with sym.kv_create() as kv:
        sym.pred(kv, [1])
        print("ready", flush=True)
        for line in sys.stdin:
            end, count = time.monotonic() + float(line.split()[1]), 0
            while time.monotonic() < end:
                sym.pred(kv, [1])
                count += 1
                if not count % 500:  # the model's context is short
                    sym.kv_truncate(kv, 1)
            print(count, flush=True)
"""


def preds(victim: Program, attacker: Program, seconds: float) -> tuple[int, int]:
    """Return the number of another user's calls while the attacker's threads call at depth 1, and the number while
    these threads call at the bottom.

    The attacker's threads call at the two places in turns, because other processes may use the machine. If calls at the
    bottom seem to cost too much, the measurement is repeated for a longer time.
    """
    for again in range(TRIES):
        got = [0, 0]
        for _ in range(TURNS):
            for place in range(2):
                attacker.begin("at", place)
                attacker.wait()
                attacker.begin("threads", seconds * (again + 1))
                victim.begin("preds", seconds * (again + 1))
                got[place] += int(victim.wait())
                attacker.wait()
        if got[1] >= got[0] / 2:
            break
    return got[0], got[1]


def main() -> int:
    args = options(__doc__)
    depth, calls, seconds = (QUICK_DEPTH, QUICK_CALLS, 0.3) if args.quick else (DEPTH, CALLS, 2.0)
    names = ["fail", "sync", "make_and_sync", "move", "move_from_root"]
    with (
        daemon(tree=args.tree) as served,
        program(served, ATTACKER, WORK, served.mount / "mine") as attacker,
        program(served, VICTIM, PREDS) as victim,
    ):
        attacker.begin("descend", 1)
        attacker.wait()
        shallow = {each: attacker.cost_us(each, calls) for each in names}
        attacker.begin("descend", depth - 1)
        attacker.wait()
        attacker.cost_us("sync", 1)  # commits the new directories
        deep = {each: attacker.cost_us(each, calls) for each in names}
        got, got_deep = preds(victim, attacker, seconds)
    broken = [
        f"{each} costs {deep[each]:.0f} us at depth {depth}, {shallow[each]:.0f} at depth 1"
        for each in names
        if deep[each] > MOST * shallow[each] + SLACK_US
    ]
    if got_deep < got / 2:
        broken.append(f"{got_deep} preds of another user, {got} while the calls were at depth 1")
    costs = ", ".join(f"{each} {shallow[each]:.0f} to {deep[each]:.0f}" for each in names)
    return verdict(f"from depth 1 to {depth}, us of a call: {costs}; another user's preds {got} to {got_deep}", broken)


if __name__ == "__main__":
    sys.exit(main())
