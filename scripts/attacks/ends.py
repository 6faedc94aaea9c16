#!/usr/bin/env python3
"""Programs that try to go on when their time limit is over.

    .venv/bin/python scripts/attacks/ends.py [--quick] [--tree CHECKOUT]

The programs ignore every signal, stop themselves, fork twice into sessions of their own, fork on SIGTERM, flood their
output, or take every descriptor. Each program runs once in a sandbox and once without one. The program must end with
status 124 soon after its limit, and leave no process. Needs root. Root's programs have the same launcher as those of
any user.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from attacked import Daemon, daemon, options, verdict

LIMIT_S, ENDED_WITHIN_S = 1.0, 30.0
"""Time limit of each program, and the longest time until the program has ended. SIGKILL follows two seconds after
SIGTERM, and machines may be slow.
"""
IGNORE = """
for number in {*range(1, 32)} - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
"""
PROGRAMS = {
    "ignores": IGNORE + "time.sleep(600)",
    "becomes another": IGNORE + "os.execv('/bin/sleep', ['sleep', '600'])",
    "stops": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)",
    "forks twice": IGNORE
    + """
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
time.sleep(600)
""",
    "forks when it is to end": """
def more(*_):
    if os.fork() == 0:
        os.setsid()
signal.signal(signal.SIGTERM, more)
while True: time.sleep(600)
""",
    "floods": IGNORE + "while True: os.write(1, b'x' * 65536)",
    "takes descriptors": """
try:
    while True: os.open("/dev/null", os.O_RDONLY)
except OSError: time.sleep(600)
""",
}
QUICK = "stops", "forks twice"


def symphony(served: Daemon, tree: Path, *words: object, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command as root, with a launcher of its own."""
    environment = served.environment | {"PYTHONPATH": str(tree), "XDG_RUNTIME_DIR": str(served.state.parent)}
    return subprocess.run(
        list(map(str, [sys.executable, "-P", "-m", "symphony", *words])), cwd=served.state.parent,
        env=environment | {"OF_THE_ATTACK": str(served.state.parent)}, capture_output=True, text=True, check=False,
        timeout=seconds,
    )  # fmt: skip


def processes(served: Daemon) -> set[int]:
    """Return the processes that the attack has started. A fork of the zygote has the zygote's environment."""
    found = set[int]()
    marks = tuple(f"{name}={served.state.parent}".encode() for name in ("OF_THE_ATTACK", "SYMPHONY_ZYGOTE_OF"))
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(each.startswith(marks) for each in (process / "environ").read_bytes().split(b"\0")):
                found.add(int(process.name))
        except OSError:
            continue  # the process has ended
    return found


def attack(served: Daemon, tree: Path, before: set[int], isolation: str, name: str) -> list[str]:
    """Run one program in one isolation. Return the failures. `before`: processes that ran earlier, including the
    zygote.
    """
    file = served.state.parent / "prog.py"
    file.write_text(f"import os, signal, time\n{PROGRAMS[name]}\n")
    began_s = time.monotonic()
    words = ["run", "-d", "--name", "prog", "--isolation", isolation, "--time", LIMIT_S, file]
    if (done := symphony(served, tree, *words)).returncode:
        return [f"{isolation}, {name}: {done.stderr}"]
    try:
        status = symphony(served, tree, "wait", "prog", seconds=ENDED_WITHIN_S).returncode
    except subprocess.TimeoutExpired:
        return [f"{isolation}, {name}: it runs still after {time.monotonic() - began_s:.0f} s"]
    end_s = time.monotonic() + 5
    while (living := processes(served) - before) and time.monotonic() < end_s:
        time.sleep(0.1)
    broken = [f"{isolation}, {name}: it has left {living}"] if living else []
    return broken if status == 124 else [*broken, f"{isolation}, {name}: it ended with {status}"]


def main() -> int:
    asked = options(__doc__)
    names, isolations = (QUICK, ["standard"]) if asked.quick else (tuple(PROGRAMS), ["standard", "none"])
    with daemon("--kv-memory", "64M", tree=asked.tree) as served:
        symphony(served, asked.tree, "run", "--isolation", "none", "/bin/true")
        before, broken = processes(served), list[str]()
        assert before, "the search does not find the zygote, and would miss its forks"
        for isolation in isolations:
            for name in names:
                broken += attack(served, asked.tree, before, isolation, name)
        if not served.serves():
            broken.append("the daemon does not serve")
    number = len(names) * len(isolations)
    return verdict(f"{number} programs that resisted their end have ended, and left no process", broken)


if __name__ == "__main__":
    sys.exit(main())
