"""The turns of steps.py: a daemon, a crew of programs, and the plain loop, each in processes of their own."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent / "crowds"))

from attacked import Attacked, attacked
from load import Others, cpu_s, wait_for_quiet

import libsym as sym

HERE = Path(__file__).resolve().parent


@dataclass(slots=True)
class Row:
    """One figure: of each round, and the reference's of the same round."""

    what: str
    unit: str
    figures: list[float]
    reference: str = ""
    references: list[float] = field(default_factory=list)
    aim: str = ""
    wakeups: float | None = None
    """Times that a thread of the daemon or of a program slept, for each token."""
    cpu_us: tuple[float, float] | None = None
    """Processor time for each token: of the daemon and the programs, and of the reference."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        if not self.references:
            return None
        return statistics.median(own / other for own, other in zip(self.figures, self.references, strict=True))

    def line(self) -> str:
        text = f"{self.what:56}{statistics.median(self.figures):>10.2f} {self.unit:9}"
        text += f"{f'{min(self.figures):.1f} to {max(self.figures):.1f}':>20}"
        if self.ratio is not None:
            text += f"  {self.reference} {statistics.median(self.references):.2f}, ratio {self.ratio:.3f}"
        if self.aim:
            text += f" (aim {self.aim})"
        if self.wakeups is not None:
            text += f"; {self.wakeups:.2f} wake-ups a token"
        if self.cpu_us is not None:
            text += "; processor time a token {:.0f} us, the loop's {:.0f}".format(*self.cpu_us)
        return text + (f"; {self.note}" if self.note else "")


class Lines:
    """A helper process that answers each line with a line."""

    def __init__(self, command: list[str | Path], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self._process.pid

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a helper process of the bench has ended: see above")
        return json.loads(line)

    def ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Spent(NamedTuple):
    """What a turn took beside time."""

    wakeups: int
    cpu_s: float
    load: float
    others: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn found: every sequence's times."""

    began_s: float
    came_s: list[list[float]]
    tokens: list[list[int]]
    wakeups: int
    cpu_s: float
    """Processor time of all its processes: other work on the machine changes it less than it changes rates."""
    load: float
    others: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.came_s))

    @property
    def whole(self) -> float:
        """Tokens a second, prompts included."""
        return self.num_tokens / (max(each[-1] for each in self.came_s) - self.began_s)

    @property
    def steady(self) -> float:
        """Tokens a second while all sequences decode; 0 when they never did at once."""
        since_s, until_s = max(each[0] for each in self.came_s), min(each[-1] for each in self.came_s)
        if until_s <= since_s:
            return 0.0
        num = sum(since_s < at_s <= until_s for each in self.came_s for at_s in each)
        return num / (until_s - since_s)

    @property
    def wakeups_per_token(self) -> float:
        return self.wakeups / self.num_tokens

    @property
    def cpu_us_per_token(self) -> float:
        return self.cpu_s * 1e6 / self.num_tokens


class Bench:
    """One precision: its daemon, its crew, its loop."""

    def __init__(self, args: argparse.Namespace, daemon: Attacked, crew: Lines, loop: Lines) -> None:
        self.args = args
        self.rounds: int = args.rounds
        self.is_quick: bool = args.quick
        self.daemon, self.crew, self.loop = daemon, crew, loop
        self.rows: list[Row] = []
        self.details: dict[str, Any] = {}
        self.loads: list[float] = []
        self.others: list[float] = []
        self._rng = random.Random(1)
        texts = sym.vocabulary()
        self.words = [token for token, text in enumerate(texts) if re.fullmatch(rb" [a-z]{2,}", text)]
        self.words = self.words or [token for token, text in enumerate(texts) if re.fullmatch(rb"[a-z]", text)]
        """The tiny model has letters alone."""

    def prompt(self, count: int) -> list[int]:
        return self._rng.choices(self.words, k=count)

    # Turns

    def least_disturbed(self, turn: Callable[[], Turn]) -> Turn:
        found: list[Turn] = []
        while not found or (found[-1].others > self.args.quiet and len(found) < self.args.tries):
            wait_for_quiet(self.args.quiet, self.args.patience)
            found.append(turn())
        best = min(found, key=lambda each: each.others)
        self.loads.append(best.load)
        self.others.append(best.others)
        return best

    def by_crew(self, members: list[dict[str, Any]]) -> tuple[dict[str, Any], Spent]:
        """What it found, and what that took."""
        load, pids = os.getloadavg()[0], (self.daemon.pid, self.crew.pid)
        others, sleeps_before, cpu_before_s = Others(pids), sleeps(self.daemon.pid), sum(map(cpu_s, pids))
        found = self.crew.ask([dict(member) for member in members])
        wakeups = sleeps(self.daemon.pid) - sleeps_before + sum(member["wakeups"] for member in found["members"])
        return found, Spent(wakeups, sum(map(cpu_s, pids)) - cpu_before_s, load, others.share())

    def crew_turn(self, members: list[dict[str, Any]]) -> Callable[[], Turn]:
        def turn() -> Turn:
            found, spent = self.by_crew(members)
            each = found["members"]
            tokens = [member.get("tokens", []) for member in each]
            return Turn(found["began_s"], [member["came_s"] for member in each], tokens, *spent)

        return turn

    def loop_turn(self, request: dict[str, Any]) -> Callable[[], Turn]:
        def turn() -> Turn:
            load, others, cpu_before_s = os.getloadavg()[0], Others((self.loop.pid,)), cpu_s(self.loop.pid)
            found = self.loop.ask(request)
            self.details["share of the plain loop outside of its steps"] = round(found["outside"], 4)
            spent = Spent(found["wakeups"], cpu_s(self.loop.pid) - cpu_before_s, load, others.share())
            return Turn(found["began_s"], [found["came_s"]] * len(found["tokens"]), found["tokens"], *spent)

        return turn

    def in_turns(self, turns: dict[str, Callable[[], Turn]]) -> dict[str, list[Turn]]:
        found: dict[str, list[Turn]] = {name: [] for name in turns}
        names = list(turns)
        for number in range(self.rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                turn = self.least_disturbed(turns[name]) if number else turns[name]()
                if number:  # the first round warms up
                    found[name].append(turn)
        return found

    # Results

    def add_rates(self, what: str, turns: list[Turn], loop: list[Turn], aim: str) -> None:
        for part, rate in (("", "whole"), (", while all decode", "steady")):
            figures, references = ([getattr(turn, rate) for turn in each] for each in (turns, loop))
            if not all(figures):
                continue  # more streams than a step has seats may never all decode
            row = Row(f"{what}{part}", "tokens/s", figures, "plain loop", references, aim)
            row.wakeups = statistics.median(turn.wakeups_per_token for turn in turns)
            row.cpu_us = cpu_us(turns, loop)
            self.add(row)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"  {row.line()}", file=sys.stderr, flush=True)


def cpu_us(turns: list[Turn], loop: list[Turn]) -> tuple[float, float]:
    own, references = (statistics.median(turn.cpu_us_per_token for turn in each) for each in (turns, loop))
    return own, references


def sleeps(pid: int) -> int:
    """How often the threads of a process gave their core up to wait."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            text = status.read_text()
        except OSError:  # a thread that has just ended
            continue
        total += int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


@contextmanager
def benched(args: argparse.Namespace, precision: str, *options: str) -> Iterator[Bench]:
    threads = ["--threads", str(args.threads)] if args.threads else []
    with attacked(args, "--precision", precision, *threads, *options) as daemon:
        sym.connect(daemon.socket)
        crew = Lines([sys.executable, HERE / "steps_programs.py"], daemon.environment)
        loop = Lines(
            [sys.executable, HERE / "steps_loop.py", args.model, precision, str(args.pages)], daemon.environment
        )
        try:
            loop.read()
            while sym.daemon_stat()["weights"] != "loaded":
                time.sleep(0.05)
            yield Bench(args, daemon, crew, loop)
        finally:
            sym.close()
            crew.close()
            loop.close()
