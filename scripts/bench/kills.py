#!/usr/bin/env python3
"""Programs that are killed: how soon their pages are free again, and that a thousand of them leave nothing behind.

Starts a daemon of its own with the tiny model. Run it as root (or where a user may mount) with the repository's
interpreter: .venv/bin/python scripts/bench/kills.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import libsym as sym  # noqa: E402 - the path comes first
from symphony.launcher import client, processes, wire  # noqa: E402
from symphony.launcher.places import Places, find_places  # noqa: E402

SYMPHONY = [sys.executable, "-m", "symphony"]
HOLDS = """
import signal
import libsym as sym
kv = sym.kv_create()
sym.kv_write(kv, [1] * 4000)
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
"""A program is killed so long after it began to call, at most."""
SETTLE_S = 10.0
ENDLESS = 1_000_000


class Setting:
    """A daemon, its launcher, and programs that they run."""

    def __init__(self, base: Path, daemon: int, isolation: str) -> None:
        self.base, self.daemon, self.isolation = base, daemon, isolation
        self.places: Places = find_places(os.environ["SYMPHONY_SOCKET"])

    def start(self, name: str, source: str, *args: str) -> tuple[socket.socket, int]:
        """Its connection, and the pid of its first process."""
        path = self.base / f"{name}.py"
        path.write_text(source)
        spec = {"path": str(path), "python": True, "args": list(args), "env": dict(os.environ), "cwd": "/"}
        spec |= {"has_input": False, "isolation": self.isolation, "shows": [(str(self.base), str(self.base), False)]}
        connection = client.opened(self.places, {"do": "run", "spec": spec, "detach": False})
        return connection, client.answer(connection)["pid"]

    @property
    def launcher(self) -> int:
        return int(self.places.lock.read_text())

    def figures(self) -> dict[str, int]:
        """What has to be as before when programs have gone."""
        stat = sym.daemon_stat()
        found = {name: stat[name] for name in ("num_free_pages", "num_files", "lips", "programs", "waiting_calls")}
        for name, pid in (("daemon", self.daemon), ("launcher", self.launcher)):
            found[f"descriptors of the {name}"] = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
        # A receiver has one, and ends with what a program that was killed has left in its queue.
        found["descriptors of the daemon"] -= num_receivers(self.daemon)
        found["processes"] = len(processes.descendants([self.launcher]))
        found["living"] = len(client.request(self.places, {"do": "ps", "all": False})["programs"])
        return found


def num_receivers(daemon: int) -> int:
    """Processes beside the daemon that receive descriptors in its place."""
    commands = (Path(f"/proc/{pid}/cmdline") for pid in processes.descendants([daemon]))
    return sum(b"receiver.py" in command.read_bytes() for command in commands if command.exists())


@contextmanager
def setting(isolation: str) -> Iterator[Setting]:
    with tempfile.TemporaryDirectory(prefix="sb") as name:
        base = Path(name)
        os.environ |= {"SYMPHONY_SOCKET": str(base / "d.sock"), "XDG_RUNTIME_DIR": name, "PYTHONPATH": str(REPOSITORY)}
        options = ["--model", "tiny", "--mount", base / "kv", "--state", base / "state", "--kv-memory", "64M"]
        words = [*SYMPHONY, "serve", *options]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as daemon:
            try:
                assert daemon.stdout is not None
                assert daemon.stdout.readline()
                sym.connect(os.environ["SYMPHONY_SOCKET"])
                here = Setting(base, daemon.pid, isolation)
                try:
                    yield here
                finally:
                    end(here.launcher)
                    sym.close()
            finally:
                daemon.terminate()
                if daemon.wait():  # its mount would keep the directory from being removed
                    subprocess.run(["fusermount3", "-uzq", base / "kv"], check=False)


def end(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)


def output(connection: socket.socket) -> bytes:
    """The next that it writes; nothing when it has ended."""
    kind, content = wire.receive(connection)
    return content if kind == wire.OUTPUT else b""


def milliseconds_until_free(here: Setting, number: int) -> list[float]:
    """From the kill of a program to the answer of the daemon that has its pages."""
    found = []
    for _ in range(number):
        free = sym.daemon_stat()["num_free_pages"]
        connection, pid = here.start("holds", HOLDS)
        assert output(connection), "the program has ended: does the daemon live?"
        assert sym.daemon_stat()["num_free_pages"] < free
        begin_s = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        while sym.daemon_stat()["num_free_pages"] < free:
            pass
        found.append(1e3 * (time.perf_counter() - begin_s))
        with connection:
            while output(connection):
                pass
    return found


def kill(here: Setting, number: int, seed: int) -> None:
    """So many programs, one after the other, each somewhere inside its calls."""
    draw = random.Random(seed)
    for turn in range(number):
        connection, pid = here.start(f"calls{seed}", CALLS, ("pred", "generate")[turn % 2])
        with connection:
            assert output(connection)
            time.sleep(draw.uniform(0, MOST_S))
            os.kill(pid, signal.SIGKILL)
            while output(connection):
                pass


def kill_many(here: Setting, number: int) -> None:
    """Some at once."""
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            kill(here, number // AT_ONCE + (seed < number % AT_ONCE), seed)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(AT_ONCE)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failed:
        raise failed[0]


def at_rest(here: Setting) -> dict[str, int]:
    """The figures when none of the programs is about to end any more."""
    before, found = {}, here.figures()
    while found["living"] or found != before:
        time.sleep(0.1)
        before, found = found, here.figures()
    return found


def what_stays(here: Setting, before: dict[str, int]) -> dict[str, int]:
    """Figures that do not become again what they were, and by how much they differ."""
    until_s = time.monotonic() + SETTLE_S
    while True:
        differs = {name: value - before[name] for name, value in here.figures().items() if value != before[name]}
        if not differs or time.monotonic() > until_s:
            return differs
        time.sleep(0.05)


def kills(here: Setting, number: int) -> dict[str, object]:
    quiet, _ = here.start("goes_on", GOES_ON, "1")
    with quiet:
        wanted = output(quiet)
    kill_many(here, AT_ONCE)
    before = at_rest(here)
    beside, pid = here.start("goes_on", GOES_ON, str(ENDLESS))
    heard: list[bytes] = []
    listens = threading.Thread(target=lambda: heard.extend(iter(lambda: output(beside), b"")))
    listens.start()
    begin_s = time.perf_counter()
    kill_many(here, number)
    taken_s = time.perf_counter() - begin_s
    os.kill(pid, signal.SIGKILL)
    listens.join()
    beside.close()
    rounds = b"".join(heard).splitlines(keepends=True)
    doctor = subprocess.run([*SYMPHONY, "doctor"], check=False, capture_output=True, text=True)
    return {
        "killed": number,
        "seconds": taken_s,
        "what stays": what_stays(here, before),
        "rounds beside": len(rounds),
        "rounds that differ": sum(each != wanted for each in rounds if each.endswith(b"\n")),
        "doctor": "clean" if doctor.returncode == 0 else doctor.stdout,
    }


def spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "best": min(times), "worst": max(times)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--frees", type=int, default=50)
    parser.add_argument("--isolation", default="none")
    parser.add_argument("--quick", action="store_true", help="16 kills, and 2 whose pages are waited for")
    args = parser.parse_args()
    if args.quick:
        args.kills, args.frees = 16, 2
    with setting(args.isolation) as here:
        milliseconds_until_free(here, 1)
        free_ms = spread(milliseconds_until_free(here, args.frees))
        killed = kills(here, args.kills)
    found = {
        "isolation": args.isolation,
        "ms until a killed program's pages are free": free_ms,
        "kill -9 in calls": killed,
    }
    print(json.dumps(found, indent=2, default=lambda value: round(value, 2)))
    is_clean = not killed["what stays"] and killed["doctor"] == "clean"
    return 0 if is_clean and killed["rounds beside"] and not killed["rounds that differ"] else 1


if __name__ == "__main__":
    sys.exit(main())
