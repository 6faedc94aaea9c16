"""The daemons of one run, what runs beside them, and what was found."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import libsym as sym

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure and its peer."""

    what: str
    unit: str
    ours: float
    peer: str = ""
    peers: float = 0.0
    ratio: float = 0.0
    """How many times as fast as the peer."""
    aim: str = ""


@dataclass(slots=True)
class Held:
    """How long the trio thread was held during one figure."""

    what: str
    num: int = 0
    num_long: int = 0
    longest_s: float = 0.0
    """Of the daemon, since it started."""
    beyond_s: dict[float, int] = field(default_factory=dict)
    """How many times were beyond each bound from the rule's on, and within twice as much."""


class Bench:
    """One run: where its daemons live, and what was found."""

    def __init__(self, directory: Path, sockets: Path, options: argparse.Namespace) -> None:
        """`directory`: of states and the peers' files; `sockets`: of the mount and the socket."""
        self.directory = directory
        self.mount = sockets / "kv"
        self.socket = sockets / "s"
        self.mount.mkdir()
        self.environment = os.environ | {"SYMPHONY_SOCKET": str(self.socket), "PYTHONPATH": str(REPOSITORY)}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a start does not compile
        self.model: str = options.model
        self.precision: str = options.precision
        self.is_quick: bool = options.quick
        self.rounds: int = options.rounds
        self.rows: list[Row] = []
        self.held: list[Held] = []
        self.parts: dict[str, float] = {}

    # Daemons

    def command(self, state: str, model: str, precision: str, memory: str) -> list[str | Path]:
        where = ["--mount", self.mount, "--state", self.directory / state, "--socket", self.socket]
        return ["serve", "--model", model, "--precision", precision, "--kv-memory", memory, *where]

    @contextmanager
    def daemon(
        self, what: str, state: str, model: str = "", precision: str = "", memory: str = "1G", *, loaded: bool = True
    ) -> Iterator[subprocess.Popen[str]]:
        """One that is connected, and has its weights; it drains in the end. `what`: the figure that it is for."""
        served = self.start(state, model or self.model, precision or self.precision, memory)
        try:
            sym.connect(self.socket)
            while loaded and sym.daemon_stat()["weights"] != "loaded":
                time.sleep(0.02)
            yield served
            self._note_held(what)
        finally:
            sym.close()
            self.stop(served)

    def start(
        self, state: str, model: str, precision: str, memory: str, program: tuple[str, ...] = ("-m", "symphony")
    ) -> subprocess.Popen[str]:
        with (self.directory / "daemon.log").open("ab") as log:
            served = subprocess.Popen(
                [sys.executable, *program, *self.command(state, model, precision, memory)],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                env=self.environment,
                text=True,
            )
        assert served.stdout is not None
        self.ready_line = served.stdout.readline()
        if not self.ready_line:
            raise SystemExit("the daemon did not start:\n" + (self.directory / "daemon.log").read_text()[-2000:])
        return served

    def stop(self, served: subprocess.Popen[str]) -> None:
        served.terminate()
        status = served.wait(120)
        assert served.stdout is not None
        served.stdout.close()
        if status:
            raise SystemExit(f"the daemon ended with status {status}: see {self.directory / 'daemon.log'}")

    def _note_held(self, what: str) -> None:
        info = sym.daemon_stat()["held"]
        found = next((each for each in self.held if each.what == what), None)
        if found is None:
            found = Held(what)
            self.held.append(found)
        found.num += info["num"]
        found.num_long += info["num_long"]
        found.longest_s = max(found.longest_s, info["longest_s"])
        for bound_s, num in zip(info["bounds_s"], info["nums"][1:], strict=True):
            if bound_s >= info["long_s"] and num:
                found.beyond_s[bound_s] = found.beyond_s.get(bound_s, 0) + num

    def program(self, source: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", source, *map(str, arguments)]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)

    @contextmanager
    def beside(self, source: str, *arguments: object) -> Iterator[None]:
        program = self.program(source, *arguments)
        try:
            yield
            assert program.poll() is None, "a program beside has ended"
        finally:
            program.kill()
            program.communicate()

    # What is found

    def times(self, what: str, ours_s: list[float], peer: str, peers_s: list[float], aim: str = "") -> None:
        ratio = statistics.median(theirs / own for own, theirs in zip(ours_s, peers_s, strict=True))
        own, theirs = statistics.median(ours_s), statistics.median(peers_s)
        self.rows.append(Row(what, "ms", own * 1e3, peer, theirs * 1e3, ratio, aim))

    def rates(self, what: str, unit: str, ours: list[float], peer: str, peers: list[float], aim: str = "") -> None:
        ratio = statistics.median(own / theirs for own, theirs in zip(ours, peers, strict=True))
        self.rows.append(Row(what, unit, statistics.median(ours), peer, statistics.median(peers), ratio, aim))
