#!/usr/bin/env python3
"""A service manager's watchdog: other users' requests must not starve it. When a hung daemon is ended, all processes
that wait for its mount must continue.

    .venv/bin/python scripts/attacks/watchdog.py [--quick] [--tree CHECKOUT]

The script plays the service manager. While the attacker makes, lists and removes files, the script measures the time
between the daemon's messages. Then the script stops the daemon, waits until it is silent, and ends it as systemd does.
Processes that waited for the mount must continue. Needs root.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from attacked import _BECOME, ANSWER_S, ATTACKER, VICTIM, Daemon, daemon, options, verdict

WATCHDOG_S = 2.0
CROWD = """
    print("begun", flush=True)
    while True:
        for number in range(500):
            open(f"{sys.argv[1]}/crowd-{number}", "w").close()
        os.listdir(sys.argv[1])
        for number in range(500):
            os.unlink(f"{sys.argv[1]}/crowd-{number}")
"""


def longest_silence_s(manager: socket.socket, for_s: float) -> float:
    """Return the longest time between two messages that feed the watchdog."""
    longest_s, last_s, end_s = 0.0, time.monotonic(), time.monotonic() + for_s
    while (now_s := time.monotonic()) < end_s:
        manager.settimeout(end_s - now_s)
        try:
            is_food = b"WATCHDOG=1" in manager.recv(4096)
        except TimeoutError:
            break
        if is_food:
            longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
    return max(longest_s, time.monotonic() - last_s)


def starves(served: Daemon, manager: socket.socket, for_s: float) -> list[str]:
    command = [sys.executable, "-c", _BECOME + textwrap.dedent(CROWD), str(ATTACKER), str(served.mount)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=served.environment, cwd="/") as crowd:
        try:
            assert crowd.stdout is not None
            crowd.stdout.readline()
            silence_s = longest_silence_s(manager, for_s)
        finally:
            crowd.kill()
    return [f"requests of a user starve the watchdog: {silence_s:.1f} s"] if silence_s >= WATCHDOG_S else []


def hangs(served: Daemon, manager: socket.socket) -> list[str]:
    os.kill(served.pid, signal.SIGSTOP)
    manager.setblocking(False)
    while True:
        try:
            manager.recv(4096)
        except BlockingIOError:
            break
    listing = ["ls", str(served.mount)]
    with subprocess.Popen(listing, user=VICTIM, group=VICTIM, extra_groups=[], stderr=subprocess.DEVNULL) as victim:
        broken = [] if longest_silence_s(manager, WATCHDOG_S) >= WATCHDOG_S else ["a stopped daemon is fed for"]
        for number in (signal.SIGABRT, signal.SIGCONT):
            os.kill(served.pid, number)
        try:
            served.process.wait(ANSWER_S)
            victim.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            served.process.kill()
            broken.append("a process that waited for a hung daemon still waits after the daemon's end")
    return broken


def main() -> int:
    asked = options(__doc__)
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = Path(directory, "notify")
        manager.bind(str(path))
        os.environ.update(NOTIFY_SOCKET=str(path), WATCHDOG_USEC=str(int(1e6 * WATCHDOG_S)))
        with daemon("--kv-memory", "64M", tree=asked.tree) as served:
            broken = starves(served, manager, 3 if asked.quick else 60) + hangs(served, manager)
    return verdict("the watchdog is fed beside a crowd, not in a hang; the daemon's end frees all who wait", broken)


if __name__ == "__main__":
    sys.exit(main())
