#!/usr/bin/env python3
"""Bad configurations that replace a good one, by an operator's mistake or by a user who may write to the file.

    .venv/bin/python scripts/attacks/reloads.py [--quick] [--tree CHECKOUT]

The daemon reloads each bad file while uid 4243 computes rows: a directory, a device, a FIFO, a file of a gigabyte, NUL
bytes, wrong types, excessive keys and values, a file that all users may write to, a policy that is a FIFO or a device.
Within ANSWER_S the daemon says why it refuses the file, keeps its settings, and then accepts the good file that
follows. A policy on the daemon's own mount is accepted. Needs root.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from attacked import VICTIM, Daemon, Program, daemon, options, program, verdict

ANSWER_S = 60
QUICK = "fifo", "a policy that is a fifo", "a policy on the mount", "a long array", "a key of many parts", "open to all"
POLICY = "def rank(files, gaps):\n    return files.idle_s\n"
HONEST = """
print("begun", flush=True)
for line in sys.stdin:
    with sym.kv_create() as kv, sym.pred(kv, [1]): pass
    print("done", flush=True)
"""
SAID, TAKEN = "symphony.daemon.reloading: configuration: ", "changed: policy"
Write = Callable[[Path], object]


def text(what: str) -> Write:
    return lambda path: path.write_text(what)


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


def open_to_all(path: Path) -> None:
    path.write_text('quota = "7M"\n')
    path.chmod(0o666)


def cases(beside: Path, mount: Path) -> dict[str, tuple[Write, str]]:
    """Return the files to write, and the daemon's expected message about each file. `beside`: a directory that root
    owns.
    """
    os.mkfifo(beside / "fifo.py")
    (beside / "zero.py").symlink_to("/dev/zero")
    (mount / "policy.py").write_text(POLICY)
    return {
        "a directory": (Path.mkdir, "Is a directory"),
        "a device": (lambda path: path.symlink_to("/dev/zero"), "it is no configuration file"),
        "fifo": (os.mkfifo, "it is a FIFO"),
        "a gigabyte": (large, "it is no configuration file"),
        "NUL": (text('quota = "1G"\n\0\n'), ":2: no TOML"),
        "a wrong type": (text("\nquota = [1]\n"), ":2: quota"),
        "not a number": (text("\n\nstep_ms = nan\n"), ":3: step_ms"),
        "a number without measure": (text("quota = 1" + "0" * 4000 + "\n"), ":1: quota"),
        "a key without measure": (text("a" * 900_000 + " = 1\n"), ":1: unknown key"),
        "a key of many parts": (text("\n" + "a." * 20_000 + "a = 1\n"), ":2: no configuration"),
        "a long array": (text("\nmodel = [\n" + "\n" * 20_000 + "]\n"), ":2: model"),
        "a long text": (text("model = '''\n" + "a\n" * 20_000 + "'''\nquota = true\n"), ":20003: quota"),
        "open to all": (open_to_all, "all may write to"),
        "a policy that is a fifo": (text(f'policy = "{beside}/fifo.py"\n'), "it is a FIFO"),
        "a policy without end": (text(f'policy = "{beside}/zero.py"\n'), "it is no policy"),
        "a policy on the mount": (text(f'policy = "{mount}/policy.py"\n'), TAKEN),
    }


def reload(served: Daemon) -> str:
    """Reload the configuration. Return the daemon's log line about the reload. TimeoutError: there is no such line."""
    num_before = served.log.read_text().count(SAID)
    os.kill(served.pid, signal.SIGHUP)
    end_s = time.monotonic() + ANSWER_S
    while (said := served.log.read_text().split(SAID)[1:])[num_before:] == [] or "\n" not in said[-1]:
        if time.monotonic() > end_s:
            raise TimeoutError
        time.sleep(0.02)
    return said[-1].partition("\n")[0]


def replace(path: Path, write: Write) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    write(path)


def attack(served: Daemon, config: Path, victim: Program, name: str, case: tuple[Write, str]) -> list[str]:
    write, said = case
    broken = []
    try:
        for what, expected in ((write, said), (text('policy = "lru"\n'), TAKEN), (text(""), TAKEN)):
            replace(config, what)
            if expected not in (answer := reload(served)):
                broken.append(f"{name}: it is said that {answer:.300}, and not {expected!r}")
            victim.begin("row", 1)
            victim.wait()
    except TimeoutError:
        broken.append(f"{name}: the daemon does not answer")
    return broken


def main() -> int:
    asked = options(__doc__)
    with tempfile.TemporaryDirectory(prefix="attack-") as directory:
        config = Path(directory) / "symphony.toml"
        config.touch()
        with (
            daemon("--kv-memory", "64M", "--verbose", "--config", config, tree=asked.tree) as served,
            program(served, VICTIM, HONEST) as victim,
        ):
            every = cases(Path(directory), served.mount)
            names = QUICK if asked.quick else tuple(every)
            broken = list[str]()
            for name in names:
                broken += attack(served, config, victim, name, every[name])
                if any("does not answer" in line for line in broken):
                    break
            if "Traceback" in served.log.read_text():
                broken.append(f"the log has a traceback: {served.log.read_text()[-1000:]}")
    return verdict(f"{len(names)} configurations, each told of or taken, and the good one that follows taken", broken)


if __name__ == "__main__":
    sys.exit(main())
