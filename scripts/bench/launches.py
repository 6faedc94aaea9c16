#!/usr/bin/env python3
"""Measure programs of a launcher: the time to their first call, their cost, and the leftovers of killed programs.

    .venv/bin/python scripts/bench/launches.py [--only starts,alive,kills] [--isolation none,standard] [--rounds 10]
        [--launches 1000] [--alive 1000] [--kills 1000] [--save NAME] [--quick] [--json]

starts  time to a program's first answer from the daemon, with a warm and a cold launcher; the same for `symphony run`;
        rate of programs that start, call and end, eight at a time
alive   cost of each of many living programs: memory, and processor time of the launcher
kills   time until the pages of a killed program are free. Programs are killed in pred() and generate(): if anything of
        them stays, or the output of another program differs, the run fails

The daemon has the tiny model. The launcher's directory is in memory, as usual for users. Run as root, or as a user who
may mount.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from socket import socket

from harness import Daemon, Row, arguments, chosen, connected, end, processor, processor_s, seconds_of, show_rows

import libsym as sym
from symphony.launcher.asking import client
from symphony.launcher.common import wire
from symphony.launcher.common.places import find_places
from symphony.launcher.common.spec import ISOLATIONS
from symphony.launcher.machine import processes

FIRST_CALL = "import libsym as sym\nsym.send_to_user(str(sym.getpid()))\n"
LIVES = """
import signal
import libsym as sym
kv = sym.kv_create()
sym.kv_write(kv, [1] * 400)
sym.send_to_user("x")
signal.pause()
"""
CALLS = """
import sys
import libsym as sym
sym.send_to_user("x")
while True:
    with sym.kv_create() as kv:
        if sys.argv[1] == "pred":
            tokens = [1, 2, 3]
            for _ in range(300):
                tokens = [sym.pred(kv, tokens).argmax()]
        else:
            for token in sym.generate(kv, [1, 2, 3], stop_at_end=False, max_tokens=300):
                pass
"""
GOES_ON = """
import hashlib, sys
import libsym as sym
for _ in range(int(sys.argv[1])):
    with sym.kv_create() as kv:
        sampler = sym.Sampler(temperature=1.0, seed=7)
        drawn = list(sym.generate(kv, [1, 2, 3], sampler=sampler, stop_at_end=False, max_tokens=400))
    sym.send_to_user(hashlib.sha256(str(drawn).encode()).hexdigest()[:16] + "\\n")
"""
AT_ONCE = 8
MOST_S = 0.05
"""Longest time between a program's first call and its kill."""
SETTLE_S = 10.0
IN_MEMORY = Path("/dev/shm")


class Setting:
    """A daemon, its launcher, and the isolation of the launcher's programs."""

    def __init__(self, args: argparse.Namespace, daemon: Daemon, isolation: str) -> None:
        self.args, self.daemon, self.isolation = args, daemon, isolation
        self.places = find_places(str(daemon.socket))

    @property
    def launcher(self) -> int:
        return int(self.places.lock.read_text())

    def path(self, source: str) -> Path:
        path = self.daemon.where / f"{hash(source)}.py"
        if not path.exists():
            path.write_text(source)
        return path

    def start(self, source: str, *args: str) -> socket:
        path, where = self.path(source), str(self.daemon.where)
        spec = {"path": str(path), "python": True, "args": list(args), "env": dict(os.environ), "cwd": "/"}
        spec |= {"has_input": False, "isolation": self.isolation, "shows": [(where, where, False)], "limits": {}}
        return client.opened(self.places, {"do": "run", "spec": spec, "detach": False})

    @contextmanager
    def running(self, source: str, *args: str) -> Iterator[tuple[socket, int]]:
        """Yield a program's connection and the pid of its first process. After the block, read the program's output to
        its end.
        """
        with self.start(source, *args) as connection:
            pid = client.answer(connection)["pid"]
            yield connection, pid
            while output(connection):
                pass

    def figures(self) -> dict[str, int]:
        """Return the counts that must return to their earlier values when the programs have ended."""
        stat = sym.daemon_stat()
        found = {name: stat[name] for name in ("num_free_pages", "num_files", "lips", "programs", "waiting_calls")}
        for name, pid in (("daemon", self.daemon.pid), ("launcher", self.launcher)):
            found[f"descriptors of the {name}"] = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
        # The daemon has a descriptor for each receiver. A receiver ends after the queue of a killed program is empty.
        found["descriptors of the daemon"] -= num_receivers(self.daemon.pid)
        found["processes"] = len(processes.descendants([self.launcher]))
        found["living"] = len(client.request(self.places, {"do": "ps", "all": False})["programs"])
        return found


def num_receivers(daemon: int) -> int:
    """Return the number of processes that receive descriptors for the daemon."""
    commands = (Path(f"/proc/{pid}/cmdline") for pid in processes.descendants([daemon]))
    return sum(b"receiver.py" in command.read_bytes() for command in commands if command.exists())


def output(connection: socket) -> bytes:
    """Return the next output of a program, or nothing if the program has ended."""
    kind, content = wire.receive(connection)
    return content if kind == wire.OUTPUT else b""


# Starts


def first_answer_ms(here: Setting) -> float:
    """Measure the time from the request to the program's first output, which follows the daemon's answer."""
    began_s = time.perf_counter()
    with here.running(FIRST_CALL) as (connection, _):
        assert output(connection), "the program has ended: does the daemon live?"
        return 1e3 * (time.perf_counter() - began_s)


def launches_a_s(here: Setting, number: int) -> float:
    """Return the rate of programs that start, call the daemon once and end. AT_ONCE of them run at a time."""

    def launch(_: int) -> None:
        with here.running(FIRST_CALL):
            pass

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return number / seconds_of(lambda: list(threads.map(launch, range(number))))


def starts(here: Setting, rows: list[Row]) -> None:
    warm, cold, rates, commands, pythons = (list[float]() for _ in range(5))
    run = [sys.executable, "-m", "symphony", "run", "--isolation", here.isolation]
    for _ in range(here.args.rounds):
        first_answer_ms(here)
        warm += [first_answer_ms(here) for _ in range(5)]
        rates.append(launches_a_s(here, max(AT_ONCE, here.args.launches // here.args.rounds)))
        end(here.launcher)
        cold.append(first_answer_ms(here))
        for command, found in ((run, commands), ([sys.executable], pythons)):
            words = [*command, str(here.path(FIRST_CALL))]
            quietly = partial(subprocess.run, words, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
            found.append(1e3 * seconds_of(quietly))
    rows.append(Row(f"{here.isolation}: first answer, warm", "ms", warm, aim="25"))
    rows.append(Row(f"{here.isolation}: first answer, the launcher's start, too", "ms", cold, aim="150"))
    rows.append(Row(f"{here.isolation}: `symphony run`", "ms", commands, "`python`", pythons))
    rows.append(Row(f"{here.isolation}: launches of {AT_ONCE} at once", "a second", rates))


# Living programs


def memory_kib(pid: int) -> int:
    """Return the proportional set size: a shared page counts in parts, one for each process that shares it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def alive(here: Setting, rows: list[Row]) -> None:
    first_answer_ms(here)
    number, pids = here.args.alive, (here.launcher, here.daemon.pid)
    before_kib, began_s = list(map(memory_kib, pids)), time.perf_counter()
    running = [here.start(LIVES) for _ in range(number)]
    own = [client.answer(each)["pid"] for each in running]
    for each in running:
        assert output(each)
    took_s = time.perf_counter() - began_s
    kib = [sum(map(memory_kib, own)), *(memory_kib(pid) - size for pid, size in zip(pids, before_kib, strict=True))]
    spent_s, seconds = processor_s(here.launcher), 1.0 if here.args.quick else 5.0
    time.sleep(seconds)
    share = 100 * (processor_s(here.launcher) - spent_s) / seconds
    for each in running:
        each.close()
    while client.request(here.places, {"do": "ps", "all": False})["programs"]:
        time.sleep(0.05)
    sizes = "process {:.0f} KiB, the launcher {:.0f}, the daemon {:.0f}".format(*(each / number for each in kib))
    note = f"each: {sizes}; the launcher takes {share:.1f} % of a processor"
    rows.append(Row(f"{here.isolation}: until {number:,} have called", "s", [took_s], note=note))


# Kills


def free_ms(here: Setting) -> float:
    """Measure the time from the kill of a program to the daemon's answer that its pages are free."""
    free = sym.daemon_stat()["num_free_pages"]
    with here.running(LIVES) as (connection, pid):
        assert output(connection), "the program has ended: does the daemon live?"
        assert sym.daemon_stat()["num_free_pages"] < free
        began_s = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        while sym.daemon_stat()["num_free_pages"] < free:
            pass
        return 1e3 * (time.perf_counter() - began_s)


def kill_many(here: Setting, number: int) -> None:
    """Kill programs, several at a time. Each program is killed at a random time during its calls."""

    def kill(turn: int) -> None:
        with here.running(CALLS, ("pred", "generate")[turn % 2]) as (connection, pid):
            assert output(connection)
            time.sleep(random.Random(turn).uniform(0, MOST_S))
            with suppress(ProcessLookupError):  # its daemon is gone: `at_rest` fails
                os.kill(pid, signal.SIGKILL)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(kill, range(number)))


def at_rest(here: Setting) -> dict[str, int]:
    """Wait until all programs have ended and the figures no longer change. Return the figures."""
    before, found = dict[str, int](), here.figures()
    while found["living"] or found != before:
        time.sleep(0.1)
        before, found = found, here.figures()
    return found


def what_stays(here: Setting, before: dict[str, int]) -> dict[str, int]:
    """Return the figures that have not returned to their earlier values within SETTLE_S, with the differences."""
    until_s = time.monotonic() + SETTLE_S
    while True:
        differs = {name: value - before[name] for name, value in here.figures().items() if value != before[name]}
        if not differs or time.monotonic() > until_s:
            return differs
        time.sleep(0.05)


def kills(here: Setting, rows: list[Row]) -> None:
    free_ms(here)
    times = [free_ms(here) for _ in range(max(2, here.args.kills // 20))]
    with here.running(GOES_ON, "1") as (connection, _):
        wanted = output(connection)
    kill_many(here, AT_ONCE)
    before, heard = at_rest(here), list[bytes]()
    with here.start(GOES_ON, "1000000") as connection:
        pid = client.answer(connection)["pid"]
        listens = threading.Thread(target=lambda: heard.extend(iter(lambda: output(connection), b"")))
        listens.start()
        took_s = seconds_of(partial(kill_many, here, here.args.kills))
        os.kill(pid, signal.SIGKILL)
        listens.join()
    rounds = [each for each in b"".join(heard).splitlines(keepends=True) if each.endswith(b"\n")]
    words = [sys.executable, "-m", "symphony", "doctor"]
    doctor = subprocess.run(words, check=False, capture_output=True, text=True)
    stays, num_differ = what_stays(here, before), sum(each != wanted for each in rounds)
    rows.append(Row(f"{here.isolation}: until a killed program's pages are free", "ms", times, aim="100"))
    note = f"nothing stays, and {len(rounds):,} rounds beside are right"
    rows.append(Row(f"{here.isolation}: {here.args.kills:,} killed in their calls", "s", [took_s], note=note))
    if stays or num_differ or not rounds or doctor.returncode:
        raise SystemExit(f"stays: {stays}; {num_differ} of {len(rounds)} rounds differ; doctor:\n{doctor.stdout}")


PARTS = {"starts": starts, "alive": alive, "kills": kills}


def main() -> None:
    sizes = {"rounds": 10, "launches": 1000, "alive": 1000, "kills": 1000}
    kinds = {"only": ",".join(PARTS), "isolation": ",".join(ISOLATIONS), "save": str}
    args = arguments(__doc__, **kinds, **sizes, quick=False, json=False).parse_args()
    if args.quick:
        args.rounds, args.launches, args.alive, args.kills = 1, AT_ONCE, 4, 30
    elif IN_MEMORY.is_dir():
        tempfile.tempdir = str(IN_MEMORY)
    names, rows = chosen(args.only, PARTS), list[Row]()
    with connected("tiny", "--kv-memory", "64M") as daemon:
        os.environ |= daemon.environment
        for name in names:
            for isolation in args.isolation.split(","):
                PARTS[name](Setting(args, daemon, isolation), rows)
    show_rows(rows, processor(), args)


if __name__ == "__main__":
    main()
