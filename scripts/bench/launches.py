#!/usr/bin/env python3
"""Programs that a launcher starts, with isolation and without: how soon one calls the model, how many start a second,
and what a thousand that live cost. The launcher's directory is in memory, as a user's is.

Starts a daemon of its own with the tiny model. Run it as root (or where a user may mount) with the repository's
interpreter: .venv/bin/python scripts/bench/launches.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from symphony.launcher import client, wire  # noqa: E402 - the path comes first
from symphony.launcher.places import Places, find_places  # noqa: E402
from symphony.launcher.spec import ISOLATIONS  # noqa: E402

FIRST_CALL = "import libsym as sym\nsym.send_to_user(str(sym.getpid()))\n"
LIVES = "import signal\nimport libsym as sym\nkv = sym.kv_create()\nsym.send_to_user('x')\nsignal.pause()\n"
AT_ONCE = 8


LOOK_S = 5.0
IN_MEMORY = Path("/dev/shm")


def run(program: Path, isolation: str, **limits: float) -> dict[str, object]:
    """A request to run it."""
    spec = {"path": str(program), "python": True, "env": dict(os.environ), "cwd": "/", "has_input": False}
    shows = [(str(program.parent), str(program.parent), False)]
    how = {"isolation": isolation, "shows": shows, "limits": limits}
    return {"do": "run", "spec": {**spec, **how}, "detach": False}


def milliseconds_to_first_answer(places: Places, program: Path, isolation: str) -> float:
    """From the request to the first byte that the program writes, which is what the daemon told it."""
    begin_s = time.perf_counter()
    with client.opened(places, run(program, isolation)) as connection:
        client.answer(connection)
        while wire.receive(connection)[0] != wire.OUTPUT:
            pass
        taken_s = time.perf_counter() - begin_s
        while wire.receive(connection)[0] == wire.OUTPUT:
            pass
    return 1e3 * taken_s


def milliseconds_of_command(program: Path, executable: list[str]) -> float:
    begin_s = time.perf_counter()
    subprocess.run([*executable, program], check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    return 1e3 * (time.perf_counter() - begin_s)


def end_launcher(places: Places) -> None:
    """So that the next request has to start one."""
    pidfd = os.pidfd_open(int(places.lock.read_text()))
    signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)


def launches_per_second(places: Places, program: Path, isolation: str, number: int) -> float:
    """Programs that start, call the daemon once and end, some at once."""
    begin_s, running = time.perf_counter(), []
    for _ in range(number):
        if len(running) == AT_ONCE:
            to_the_end(running.pop(0))
        running.append(client.opened(places, run(program, isolation)))
    for connection in running:
        to_the_end(connection)
    return number / (time.perf_counter() - begin_s)


def to_the_end(connection) -> None:
    with connection:
        client.answer(connection)
        while wire.receive(connection)[0] == wire.OUTPUT:
            pass


def memory_kib(pid: int) -> int:
    """Proportional: pages that processes share are divided between them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def cost_of_living(
    places: Places, daemon: int, program: Path, number: int, isolation: str, **limits: float
) -> dict[str, float]:
    """KiB of each of `number` programs, in its process, the launcher and the daemon; what watching them takes."""
    launcher = int(places.lock.read_text())
    before = memory_kib(launcher), memory_kib(daemon)
    begin_s = time.perf_counter()
    running = [client.opened(places, run(program, isolation, **limits)) for _ in range(number)]
    pids = [client.answer(each)["pid"] for each in running]
    for each in running:
        assert wire.receive(each)[0] == wire.OUTPUT
    taken_s = time.perf_counter() - begin_s
    found = {
        "seconds until all have called": taken_s,
        "KiB of its process": sum(map(memory_kib, pids)) / number,
        **(
            {"KiB of its sandbox's first process": sum(map(memory_kib, map(parent, pids))) / number}
            if isolation != "none"
            else {}
        ),
        "KiB of the launcher": (memory_kib(launcher) - before[0]) / number,
        "KiB of the daemon": (memory_kib(daemon) - before[1]) / number,
        "descriptors of the launcher": len(os.listdir(f"/proc/{launcher}/fd")) / number,  # noqa: PTH208
        "% of a processor for the launcher": 100 * processor_share(launcher),
    }
    for each in running:
        each.close()
    while client.request(places, {"do": "ps", "all": False})["programs"]:
        time.sleep(0.05)
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


def processor_share(pid: int) -> float:
    """While nothing happens."""
    before_s, begin_s = processor_s(pid), time.perf_counter()
    time.sleep(LOOK_S)
    return (processor_s(pid) - before_s) / (time.perf_counter() - begin_s)


def processor_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {os.cpu_count()} processors"


def takes_isolation(symphony: list[str]) -> bool:
    """Whether the command can be told which."""
    return b"--isolation" in subprocess.run([*symphony, "run", "--help"], check=True, capture_output=True).stdout


def measure(base: Path, turns: int, launches: int, number: int) -> dict[str, object]:
    first, lives = base / "first.py", base / "lives.py"
    first.write_text(FIRST_CALL)
    lives.write_text(LIVES)
    os.environ |= {"SYMPHONY_SOCKET": str(base / "d.sock"), "XDG_RUNTIME_DIR": str(base)}
    os.environ |= {"PYTHONPATH": str(REPOSITORY)}
    symphony = [sys.executable, "-m", "symphony"]
    options = ["--model", "tiny", "--mount", base / "kv", "--state", base / "state", "--kv-memory", "64M"]
    with subprocess.Popen([*symphony, "serve", *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline()
            places = find_places(os.environ["SYMPHONY_SOCKET"])
            times = Times()
            for _ in range(turns):
                times.take(["`python`"], milliseconds_of_command(first, [sys.executable]))
                for isolation in ISOLATIONS:
                    one_turn(times, places, first, isolation, launches // turns)
            if takes_isolation(symphony):
                for isolation in ISOLATIONS * turns:
                    command = [*symphony, "run", "--isolation", isolation]
                    times.take([isolation, "ms of `symphony run`"], milliseconds_of_command(first, command))
            found: dict[str, object] = {"processor": processor(), **times.spreads()}
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            for isolation, limits in [*((each, {}) for each in ISOLATIONS), ("none", {"memory": memory})]:
                name = f"each of {number}, {isolation}, {'with a limit on memory' if limits else 'no limit asked for'}"
                found[name] = cost_of_living(places, daemon.pid, lives, number, isolation, **limits)
            end_launcher(places)
            return found
        finally:
            daemon.terminate()


class Times:
    """Measurements by name."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    def take(self, words: list[str], *values: float) -> None:
        self._taken.setdefault(", ".join(words), []).extend(values)

    def spreads(self) -> dict[str, object]:
        return {name: spread(values) for name, values in self._taken.items()}


def one_turn(times: Times, places: Places, first: Path, isolation: str, launches: int) -> None:
    warm = [milliseconds_to_first_answer(places, first, isolation) for _ in range(6)]
    times.take([isolation, "ms to the first answer, warm"], *warm[1:])
    times.take([isolation, "launches a second"], launches_per_second(places, first, isolation, launches))
    end_launcher(places)
    times.take([isolation, "ms to the first answer, cold"], milliseconds_to_first_answer(places, first, isolation))


def spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "best": min(times), "worst": max(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--alive", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sb", dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as base:
        found = measure(Path(base), args.turns, args.launches, args.alive)
    print(json.dumps(found, indent=2, default=lambda value: round(value, 2)))


if __name__ == "__main__":
    main()
