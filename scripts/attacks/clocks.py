#!/usr/bin/env python3
"""The machine's clock jumps by years, forwards and back, while the daemon serves and while it does not run.

    .venv/bin/python scripts/attacks/clocks.py [--quick] [--tree CHECKOUT]

Only the daemon's own clock moves: its `time.time()` adds an offset from a file. At each date uid 4242 uses files,
locks, deadlines and timeouts, and commits. Waits must not become longer or shorter, and no file with a TTL of an hour
may expire. Then the daemon starts again with the right clock. A file that was used at a wrong date must then expire
after its TTL, not later. Needs root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from attacked import ATTACKER, Daemon, as_user, daemon, options, verdict

YEAR_S = 365 * 86_400
YEARS, QUICK = [50, -30, 0, 200], [50, -30]
TTL_S, QUICK_TTL_S, GONE_WITHIN_S = 8, 3, 30
PLANTED = """
import time
real_ns = time.time_ns

def time_ns():
    with open({path!r}, encoding="ascii") as file:
        return real_ns() + int(file.read() or 0) * 10**9

time.time_ns = time_ns
time.time = lambda: time_ns() / 1e9
"""

USE = """
number = sys.argv[1]
def within(what, least_s, most_s, function):
    since_s = time.monotonic()
    try: function()
    except sym.WouldBlock: pass
    took_s = time.monotonic() - since_s
    if not least_s <= took_s <= most_s: print(what, "took", took_s, "s")

def write(name, ttl_s):
    with sym.kv_create(name) as kv:
        sym.kv_write(kv, [1, 2, 3])
        sym.kv_advise(kv, sym.TTL(ttl_s))
        with sym.kv_lock(kv): pass
        sym.kv_sync(kv)
        return kv

with sym.kv_create() as kv:
    within("a pred with a deadline", 0, 20, lambda: sym.pred(kv, [1], deadline=60).close())
within("recv", 0.3, 20, lambda: sym.recv(timeout=0.3))
write(f"hour{number}.kv", 3600)
write(f"short{number}.kv", float(sys.argv[2]))
names = [each.name for each in sym.kv_list()]
if names.count("hour0.kv") != 1: print("the file with a TTL of an hour has gone:", names)
if not any(each.pid == os.getpid() for each in sym.programs()): print("the program is in no list")
"""


def planted(tree: Path, directory: Path) -> tuple[Path, Path]:
    """Return a checkout whose processes have a moved clock, and the file with the clock's offset."""
    moved, clock = directory / "tree", directory / "clock"
    moved.mkdir()
    for each in tree.iterdir():
        (moved / each.name).symlink_to(each)
    (moved / "sitecustomize.py").write_text(PLANTED.format(path=str(clock)))
    clock.write_text("0")
    return moved, clock


def move(clock: Path, years: int) -> None:
    """Set the clock's offset by an atomic rename, so that a reader sees the old offset or the new one."""
    new = clock.with_suffix(".new")
    new.write_text(str(years * YEAR_S))
    new.replace(clock)


def use(served: Daemon, number: int, years: int, ttl_s: int) -> list[str]:
    done = as_user(ATTACKER, USE, number, ttl_s, served=served)
    broken = [f"{years} years: {line}" for line in (done.stdout + done.stderr).splitlines()]
    if "Traceback" in served.log.read_text() or not served.serves():
        broken.append(f"{years} years: {served.log.read_text()[-1000:]}")
    return broken


def main() -> int:
    asked = options(__doc__)
    jumps, ttl_s = (QUICK, QUICK_TTL_S) if asked.quick else (YEARS, TTL_S)
    with tempfile.TemporaryDirectory(prefix="attack-") as directory:
        tree, clock = planted(asked.tree, Path(directory))
        words = ["--kv-memory", "64M", "--state", Path(directory) / "state"]
        with daemon(*words, tree=tree) as served:
            broken = use(served, 0, 0, ttl_s)
            for number, years in enumerate(jumps, 1):
                move(clock, years)
                broken += use(served, number, years, ttl_s)
            seen = served.mount / "seen"
            seen.touch()
            if abs(seen.stat().st_ctime - time.time() - years * YEAR_S) > YEAR_S:
                broken.append("the daemon's clock was not moved: nothing was tried")
        move(clock, 0)
        with daemon(*words, tree=tree) as served:
            end_s = time.monotonic() + GONE_WITHIN_S
            while (short := list(served.mount.glob("short*.kv"))) and time.monotonic() < end_s:
                time.sleep(0.2)
            if short:
                broken.append(f"{', '.join(each.name for each in short)}: kept beyond a TTL of {ttl_s} s")
            if not (served.mount / "hour0.kv").exists():
                broken.append("the file with a TTL of an hour has gone with the restart")
    return verdict(f"jumps by {', '.join(map(str, jumps))} years, and a restart by the right clock", broken)


if __name__ == "__main__":
    sys.exit(main())
