"""Bombs, how each is started, and a neighbour that measures what they do to others."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.symphony.escapes.house import PROGRAMS, STANDARD, User

PROGRAM = PROGRAMS / "bombs.py"
SECONDS = "3s"
"""Time after which each bomb is ended."""


@dataclass(frozen=True, slots=True)
class Bomb:
    """A bomb's program, and the limits that it runs with."""

    name: str
    limits: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        return ["--time", SECONDS, *self.limits]

    @property
    def title(self) -> str:
        return " ".join((self.name, *self.limits))


BOMBS = [
    Bomb("busy"),
    Bomb("fork", ("--processes", "50")),
    Bomb("fork"),
    Bomb("fork_and_flee"),
    Bomb("threads"),
    Bomb("memory", ("--memory", "256M")),
    Bomb("memory_of_many", ("--memory", "256M")),
    Bomb("hidden_memory", ()),
    Bomb("disk"),
    Bomb("many_files"),
    Bomb("output"),
    Bomb("descriptors"),
    Bomb("descriptors_under_way"),
    Bomb("terminals"),
    Bomb("connections"),
    Bomb("kv_files"),
]

NEIGHBOUR = """
kv = sym.kv_create()
sym.kv_write(kv, [1] * 64)
print("ready", flush=True)
for line in sys.stdin:
    times, end = [], time.perf_counter() + float(line)
    while time.perf_counter() < end:
        began = time.perf_counter()
        sym.pred(kv, [1])
        times.append(1e3 * (time.perf_counter() - began))
        sym.kv_truncate(kv, 64)
        time.sleep(0.005)
    times.sort()
    p50, p99 = (times[int(share * (len(times) - 1))] for share in (0.5, 0.99))
    print(json.dumps({"p50": p50, "p99": p99, "calls": len(times)}), flush=True)
"""


class Neighbour:
    """A program of another user that calls pred() every few milliseconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def milliseconds(self) -> dict[str, float]:
        """Return the neighbour's call times since `begin`."""
        assert self._process.stdout is not None
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def neighbour(user: User) -> Iterator[Neighbour]:
    with user.started(STANDARD, user.script(NEIGHBOUR)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Neighbour(process)
        assert process.stdin is not None
        process.stdin.close()


def explode(user: User, bomb: Bomb) -> dict[str, Any]:
    """Run a bomb to its end; return its status, and the gains that it printed."""
    user.symphony("run", "--isolation", STANDARD, "-d", "--name", "bomb", *bomb.options, PROGRAM, bomb.name)
    status = int(user.symphony("wait", "bomb", check=False).stdout)
    said = [] if bomb.name == "output" else user.symphony("logs", "bomb").stdout.splitlines()
    got = [json.loads(line)["got"] for line in said if line.startswith('{"got"')]
    return {"status": status, "got": got[0] if got else None}
