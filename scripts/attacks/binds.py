#!/usr/bin/env python3
"""A program in a sandbox swaps a directory for a link while other sandboxes with the same `--bind` are set up.

    .venv/bin/python scripts/attacks/binds.py [--quick] [--tree CHECKOUT]

The outer bind is a directory that the program may write to. The inner binds lie two levels below it. The program
replaces the directory between them with a link into the host's tree. The link names the path that the host's tree has
during the setup of a sandbox. The link must not show more of the host to later sandboxes of this user. Nor may these
sandboxes create files outside the binds. Needs root. Root's programs have the same sandbox as those of other users.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from attacked import Daemon, daemon, of_root, options, verdict

SWAP = """
import ctypes, os, sys
import libsym as sym

outer, target, num_children = sys.argv[1:]
if num_children == "0":  # a child: what does it see?
    for where in (outer + "/a/b", outer + "/link/b", target):
        if os.path.exists(where + "/secret"):
            print("a child reads", where, flush=True)
    sys.exit(0)
os.symlink("/old" + target, outer + "/link")
libc, swap = ctypes.CDLL(None), 2
swapper = os.fork()
if swapper == 0:
    while True:
        libc.renameat2(-100, (outer + "/a").encode(), -100, (outer + "/link").encode(), swap)
for _ in range(int(num_children)):
    try:
        sym.wait(sym.spawn(sys.argv[0], [outer, target, "0"]))
    except sym.SymError:
        pass  # a child that is refused is what is wanted
os.kill(swapper, 9)
"""


def attack(served: Daemon, tree: Path, num_children: int) -> list[str]:
    """Swap a bound directory for a link while children start. Return the failures. The program writes to the outer
    bind. The inner binds are a directory and a file below it.
    """
    outer, target = served.state.parent / "bound", served.state.parent / "private"
    (outer / "a/b").mkdir(parents=True)
    (outer / "a/c").touch()
    target.mkdir(mode=0o700)
    (target / "secret").touch()
    program = served.state.parent / "programs/swap.py"
    program.parent.mkdir()
    program.write_text(SWAP)
    binds = [word for path in (outer, outer / "a/b", outer / "a/c") for word in ("--bind", path)]
    command = of_root(served, tree, "run", *binds, program, outer, target, num_children)
    done = subprocess.run(**command, capture_output=True, check=False, timeout=100)
    broken: list[str] = done.stdout.splitlines()
    if done.returncode:
        broken.append(done.stderr.strip())
    if made := sorted(path.name for path in target.iterdir() if path.name != "secret"):
        broken.append(f"a sandbox has made {', '.join(made)} outside of what is bound")
    return broken


def main() -> int:
    asked = options(__doc__)
    num_children = 15 if asked.quick else 300
    with daemon("--kv-memory", "64M", tree=asked.tree) as served:
        broken = attack(served, asked.tree, num_children)
    return verdict(f"{num_children} sandboxes that were made meanwhile show and make nothing else", broken)


if __name__ == "__main__":
    sys.exit(main())
