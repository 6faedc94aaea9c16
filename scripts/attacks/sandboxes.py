#!/usr/bin/env python3
"""A program in a sandbox attacks another program of the same user, which has a sandbox of its own.

The victim has a canary in its memory, its environment, an open file, shared memory and a server at an abstract address.
The attacker gets the victim's pid and all these places. The attempts are the same as in tests/symphony/escapes: memory,
descriptors, signals, /proc, limits. Without sandboxes each attempt must succeed, which shows that the attempt works.
Needs root. Root's programs have the same sandbox as those of other users.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attacked import Daemon, daemon, of_root, options, verdict

ALONE = ("signal_to_all", "shared_memory")
"""Attempts that need a sandbox. Without one, the first signals every process of root, and the second finds no victim's
memory."""
ATTEMPTS = (
    "process_vm_readv",
    "process_vm_writev",
    "proc_mem",
    "proc_environ",
    "proc_fd",
    "proc_root",
    "proc_cwd",
    "process_list",
    "ptrace",
    "signal_by_kill",
    "signal_by_tgkill",
    "signal_by_sigqueue",
    "signal_by_pidfd",
    "signal_by_socket_owner",
    "pidfd_getfd",
    "pidfd_open",
    "kcmp",
    "process_madvise",
    "limits_of_another",
    "priority_of_another",
    "affinity_of_another",
    "abstract_socket",
    "abstract_names",
    "posix_shared_memory",
)
VICTIM = """
import ctypes, json, os, signal, socket, sys, threading

canary, count = sys.argv[1], 0
memory = ctypes.create_string_buffer(canary.encode())
for path in ("/tmp/", "/dev/shm/"):
    with open(path + canary, "w") as file:
        file.write(canary)
kept = open("/tmp/" + canary)
listening = socket.socket(socket.AF_UNIX)
listening.bind("\\0" + canary)
listening.listen()

def serve():
    while True:
        connection, _ = listening.accept()
        connection.recv(100)
        connection.sendall(canary.encode())
        connection.close()

def told(*_):
    global count
    count += 1

signal.signal(signal.SIGUSR1, told)
threading.Thread(target=serve, daemon=True).start()
print(json.dumps({"victim_address": ctypes.addressof(memory), "victim_fd": kept.fileno()}), flush=True)
sys.stdin.readline()
nice, processors = os.getpriority(os.PRIO_PROCESS, 0), len(os.sched_getaffinity(0))
print(json.dumps([count, memory.value.decode() == canary, nice, processors]), flush=True)
for path in ("/tmp/", "/dev/shm/"):
    os.remove(path + canary)
"""


def attack(served: Daemon, tree: Path, isolation: str, grants: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Return the gains of each attempt, and the effects that the victim noticed."""
    canary = f"canary-{uuid.uuid4().hex}"
    program = served.state.parent / "programs/victim.py"
    program.parent.mkdir(exist_ok=True)
    program.write_text(VICTIM)
    run = ["run", "--isolation", isolation, *grants]
    pipe = subprocess.PIPE
    # PYTHONHASHSEED makes the launcher execute an interpreter, so /proc/PID/environ of the victim has the canary.
    kept = ["--env", f"CANARY={canary}", "--env", "PYTHONHASHSEED=0"]
    victim = of_root(served, tree, *run, "--name", "victim", *kept, program, canary)
    with subprocess.Popen(**victim, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        world = json.loads(process.stdout.readline()) | {
            "victim": _pid(served, tree),
            "canary": canary,
            "mark": canary,
            "secret": f"/tmp/{canary}",
            "dev_shm": f"/dev/shm/{canary}",
            "abstract": canary,
            "shm_key": 0x53594D,
            "namespaces": {each.name: str(each.readlink()) for each in Path("/proc/self/ns").iterdir()},
        }
        attacker = tree / "tests/symphony/escapes/programs/attacker.py"
        names = ATTEMPTS if isolation == "none" else ATTEMPTS + ALONE
        tried = of_root(served, tree, *run, attacker, json.dumps(world), *names)
        done = subprocess.run(**tried, capture_output=True, check=False, timeout=100)
        seen, _ = process.communicate("\n", timeout=100)
    found = {row["attack"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(found) == set(names), done.stdout + done.stderr
    assert not (wrong := [row for row in found.values() if "broken" in row]), wrong
    return {name: row["got"] for name, row in found.items()}, json.loads(seen)


def _pid(served: Daemon, tree: Path) -> int:
    listed = subprocess.run(**of_root(served, tree, "ps", "--json"), capture_output=True, check=True)
    return int(next(each["pid"] for each in json.loads(listed.stdout) if each["name"] == "victim"))


def main() -> int:
    """Attack without sandboxes, to see that the attempts work; then with sandboxes, with and without grants."""
    chosen = options(__doc__)
    broken = []
    grants: list[list[str]] = [[]] if chosen.quick else [[], ["--allow-net", "127.0.0.1:9"], ["--bind", "/srv"]]
    with daemon("--kv-memory", "64M", tree=chosen.tree) as served:
        got, _ = attack(served, chosen.tree, "none", [])
        assert not (idle := [name for name, what in got.items() if what is None]), f"broken attempts: {idle}"
        for each in grants:
            got, seen = attack(served, chosen.tree, "standard", each)
            broken += [f"{name} {' '.join(each)}: {what}" for name, what in got.items() if what is not None]
            if seen != [0, True, os.getpriority(os.PRIO_PROCESS, 0), len(os.sched_getaffinity(0))]:
                broken.append(f"the victim has seen signals, or another priority, memory or processors: {seen}")
    num_tried = len(ATTEMPTS) + len(ALONE)
    return verdict(
        f"{num_tried} attempts between two sandboxes of one user got nothing; without them each does", broken
    )


if __name__ == "__main__":
    sys.exit(main())
