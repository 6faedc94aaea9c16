#!/usr/bin/env python3
"""Names in a directory that all users may write to: another user plants files, links and claims there.

A program must not get another user's text. Nor may a planted link lead a program into a private file of its own user. A
program must not wait for a claim for ever. A reader of a file must not be able to move the file to disk.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from attacked import _BECOME, ATTACKER, VICTIM, Daemon, as_user, daemon, options, verdict

PLANT = """
    with sym.kv_create("handbook.kv", 0o644) as kv:
        sym.kv_write(kv, [9, 9, 9])
    os.symlink("private/diary.kv", f"{sys.argv[1]}/chat.kv")
    os.symlink("private", f"{sys.argv[1]}/way")
"""
KEEP = """
    os.mkdir(f"{sys.argv[1]}/private", 0o700)
    sym.kv_open_or_compute("private/diary.kv", [7, 7, 7]).close()
"""
FOLLOW = """
    for path in ("chat.kv", "way/diary.kv"):
        try:
            kv = sym.kv_open(path, "a")
        except sym.NoAccess:
            continue
        print(path, "leads into the file of", sym.kv_stat(kv).uid)
"""
COMPUTE = """
    try:
        kv = sym.kv_open_or_compute("handbook.kv", [1, 2, 3])
    except sym.NoAccess as error:
        if "uid 4242" not in str(error):
            print("the error names nobody:", error)
    else:
        print("the handbook is", sym.kv_read(kv)[0])
    if sym.kv_stat("handbook.kv").uid != 4242:
        print("the file was replaced")
"""
ADVISE = """
    try:
        sym.kv_advise("public.kv", sym.COLD)
    except sym.NotPermitted:
        pass
    else:
        print("a reader had another user's file go")
"""
HOLD = """
    def compute(kv):
        print("claimed", flush=True)
        time.sleep(600)
    sym.kv_open_or_compute("claimed.kv", compute)
"""
WANT = """
    began = time.monotonic()
    with sym.kv_open_or_compute(sys.argv[1], [1, 2, 3], owner=sys.argv[2] or None) as kv:
        assert sym.kv_read(kv)[0] == [1, 2, 3]
    print(time.monotonic() - began)
    sym.kv_remove(sys.argv[1])
"""
SWAP = """
    print("swapping", flush=True)
    name = f"{sys.argv[1]}/race.kv"
    while True:
        with sym.kv_create(None) as kv:
            try:
                sym.kv_fork(kv, "race.kv", mode=0o644).close()
                os.unlink(name)
                os.symlink("private/diary.kv", name)
                os.unlink(name)
            except OSError:
                pass
"""
RACE = """
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            kv = sym.kv_open_or_compute("race.kv", [1, 2, 3])
        except (sym.NoAccess, sym.Exists, sym.NotFound):
            continue
        if sym.kv_stat(kv).uid != os.getuid() or sym.kv_read(kv)[0] != [1, 2, 3]:
            print("the race was won")
            break
        kv.remove()
"""


def main() -> int:
    asked = options(__doc__)
    with daemon(tree=asked.tree) as served:
        broken = said(served, 0, KEEP, served.mount) + said(served, ATTACKER, PLANT, served.mount)
        for victim in (0, VICTIM):
            broken += said(served, victim, FOLLOW) + said(served, victim, COMPUTE)
        broken += said(served, VICTIM, 'sym.kv_create("public.kv", 0o644).close()') + said(served, ATTACKER, ADVISE)
        broken += waits(served, "", 10)
        if not asked.quick:
            broken += waits(served, "any", 45)
            with running(served, SWAP, served.mount):
                broken += said(served, 0, RACE)
    return verdict("no file, link or claim of another user was taken, and none was waited for without end", broken)


def said(served: Daemon, uid: int, source: str, *arguments: object) -> list[str]:
    """Run a program of a user. Return its complaints. A program that fails counts as a complaint."""
    done = as_user(uid, source, *arguments, served=served)
    return done.stdout.splitlines() + done.stderr.splitlines()[-1:]


def waits(served: Daemon, owner: str, limit_s: float) -> list[str]:
    """Return a failure if the victim waits for a claim that the attacker never ends."""
    with running(served, HOLD):
        try:
            done = as_user(VICTIM, WANT, "claimed.kv", owner, served=served, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return [f"with owner={owner!r} a claim that never ends is waited for"]
    return done.stderr.splitlines()[-1:]


@contextmanager
def running(served: Daemon, source: str, *arguments: object) -> Iterator[None]:
    """Run a program of the attacker within the block. The block begins when the program has started."""
    command = [sys.executable, "-c", _BECOME + textwrap.dedent(source), str(ATTACKER), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/", env=served.environment) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline()
            yield
        finally:
            program.kill()


if __name__ == "__main__":
    sys.exit(main())
