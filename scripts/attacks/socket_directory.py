#!/usr/bin/env python3
"""Another user makes /tmp/symphony-UID first. The user's programs must still find the system's daemon.

The script makes a mount namespace, in which /run/symphony belongs to a system daemon.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from attacked import ATTACKER, VICTIM, as_user, daemon, options, verdict

RUN = Path("/run/symphony")
TAKEN = Path(f"/tmp/symphony-{VICTIM}")
WAYS = {
    "libsym": "print('served', sym.daemon_stat()['pid'])",
    "the launcher": """
        places = find_places(str(find_socket()))
        make(places)
        assert find_places(str(find_socket())) == places
        print('served', sym.daemon_stat()['pid'])
    """,
}


AS_VICTIM = f"""
from libsym.channel.socket_path import find_socket
from symphony.launcher.common.places import find_places, make
os.setresuid({VICTIM}, {VICTIM}, {VICTIM})
"""
"""Code that runs before each attempt to find the daemon. The victim can use only modules that root has imported before.
"""


def attack(environment: dict[str, str], pid: int) -> list[str]:
    """Try each way to find the daemon while the directory is taken. Return the ways that fail, and the ways that do not
    name the owner of the directory.
    """
    broken = []
    for name, code in WAYS.items():
        done = as_user(0, AS_VICTIM + textwrap.dedent(code), env=environment)
        if f"served {pid}" not in done.stdout:
            broken.append(f"{name}: {done.stderr.strip()[-200:]}")
        elif f"it is uid {ATTACKER}'s" not in done.stderr:
            broken.append(f"{name} does not say who has the directory: {done.stderr.strip()[-200:]}")
    return broken


def main() -> int:
    """Attack a system daemon inside a mount namespace."""
    chosen = options(__doc__)
    if "IN_NAMESPACE" not in os.environ:
        command, was_there = ["unshare", "--mount", sys.executable, *sys.argv], RUN.exists()
        RUN.mkdir(exist_ok=True)
        status = subprocess.run(command, env=os.environ | {"IN_NAMESPACE": "1"}, check=False).returncode
        if not was_there:
            RUN.rmdir()
        return status
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", RUN], check=True)
    (RUN / "users").mkdir()
    (RUN / "users").chmod(0o1777)
    made = as_user(ATTACKER, ["mkdir", "-m", "700", TAKEN])
    assert made.returncode == 0, made.stderr
    try:
        with daemon(tree=chosen.tree) as served:
            for name in ("symphony.sock", "symphony.sock.programs"):
                (RUN / name).symlink_to(f"{served.socket}{name.removeprefix('symphony.sock')}")
            environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(chosen.tree), "HOME": "/"}
            broken = attack(environment, served.pid)
    finally:
        TAKEN.rmdir()
    return verdict(f"a user who takes {TAKEN} keeps no program from the system's daemon", broken)


if __name__ == "__main__":
    sys.exit(main())
