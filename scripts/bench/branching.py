#!/usr/bin/env python3
"""Programs that branch (fork, `pred()`, close, again) beside the same number of plain loops over `pred()`.

    .venv/bin/python scripts/bench/branching.py [--before TREE] [--only PART,...] [--rounds 5] [--quick] [--json]

One daemon, and programs in processes of their own that take turns; with `--before` the daemon and the programs of
another built checkout, too, and each ratio is of one round. Steps, their calls and their time are the daemon's counts;
the main thread's and the other threads' processor time is the kernel's.

rates      threads of one process: tokens a second, calls a step, times of a step, fork, pred and close, processor time
contexts   the same at 8 streams, on contexts of other lengths
processes  the same, one stream a process
tasks      the same, asyncio tasks of one process
think      plain loops that think between two calls, by streams and time
ahead      sixteen forks by one thread, and then one pred() each
programs   programs of lips/ as they are: seconds, of which in steps, and calls a step
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

sys.path.append(str(Path(__file__).resolve().parent / "crowds"))

from attacked import ROOT, SYMPHONY, Attacked, attacked, processor
from branching_programs import Asked, window
from load import Others

HERE = Path(__file__).resolve().parent
CONTEXT = 297
STREAMS = (1, 8, 64)
CONTEXTS = (1, 31, 32, 297, 7000)
WAYS = ("plain", "branch")
CALLS = ("fork", "pred", "close")
KINDS = {"": SYMPHONY}
"""Words of Python that start each kind of daemon."""
THINK_MS, THINK_STREAMS = (1, 2, 4, 8, 16), (2, 8, 32)
PROGRAMS = {
    "beam": ("The capital of France is",),
    "best_of_n": ("Why is the sky blue?", "-n", "8"),
    "tree_of_thought": ("What is 3 + 4?",),
    "mcts": ("24", "--tokens", "200"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Costs of one turn: the rate, and all else by token."""

    tokens_per_s: float
    calls_a_step: float
    step_ms: float
    fork_ms: float
    pred_ms: float
    close_ms: float
    main_us: float
    steps_us: float
    client_us: float
    others: float


class Measured(Protocol):
    """A side that takes its turn."""

    @property
    def name(self) -> str: ...

    def turn(self, asked: Asked, num_processes: int = 1) -> Found: ...

    def program(self, name: str, *arguments: str) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True)
class Side:
    """A daemon, and the tree whose programs call it."""

    name: str
    daemon: Attacked

    def stat(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "symphony.cli", "stat", "--json"]
        environment = self.daemon.environment
        done = subprocess.run(command, env=environment, cwd=self.daemon.tree, capture_output=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def processor_s(self) -> tuple[float, float]:
        """Of the main thread, and of all others."""
        spent_s = [0.0, 0.0]
        for thread in Path(f"/proc/{self.daemon.pid}/task").iterdir():
            try:
                spent = int((thread / "schedstat").read_text().split()[0]) * 1e-9
            except OSError:  # a thread that has just ended
                continue
            spent_s[thread.name != str(self.daemon.pid)] += spent
        return spent_s[0], spent_s[1]

    def turn(self, asked: Asked, num_processes: int = 1) -> Found:
        command = [sys.executable, str(HERE / "branching_programs.py"), json.dumps(asdict(asked))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        programs = [subprocess.Popen(command, env=self.daemon.environment, **pipes) for _ in range(num_processes)]
        for program in programs:
            if program.stdout.readline() != "ready\n":
                raise SystemExit("a program of the bench did not start: see above")
        since_s = time.monotonic() + 0.3
        for program in programs:
            program.stdin.write(f"{since_s}\n")
            program.stdin.flush()
        first_s, last_s = window(asked, since_s)
        time.sleep(first_s - time.monotonic())
        others = Others((self.daemon.pid, *(program.pid for program in programs)))
        before_s = self.processor_s()
        time.sleep(last_s - time.monotonic())
        after_s, share = self.processor_s(), others.share()
        found = [json.loads(program.communicate(timeout=60)[0]) for program in programs]
        num, counted = sum(each["num"] for each in found), found[0]["grown"]
        num_steps, num_seen = max(1, counted["num_steps"]), max(1.0, 0.9 * num)
        return Found(
            num / asked.seconds,
            counted["num_calls_in_steps"] / num_steps,
            1e3 * counted["step_s"] / num_steps,
            *(1e3 * statistics.median(each["median_s"].get(name, 0.0) for each in found) for name in CALLS),
            *(1e6 * (after - before) / num_seen for before, after in zip(before_s, after_s, strict=True)),
            1e6 * sum(each["processor_s"] for each in found) / num_seen,
            share,
        )

    def program(self, name: str, *arguments: str) -> tuple[float, ...]:
        """Run a program as `symphony run` starts it: seconds, steps, calls in them, their seconds."""
        before, began_s = self.stat(), time.monotonic()
        command = [sys.executable, "-m", "symphony.cli", "run", name, *arguments]
        environment = self.daemon.environment
        done = subprocess.run(command, env=environment, cwd=self.daemon.tree, capture_output=True, check=False)
        took_s, after = time.monotonic() - began_s, self.stat()
        if done.returncode not in (0, 1):  # 1: a small model's answer is none
            raise SystemExit(f"{name} ended with status {done.returncode}: {done.stderr.decode()}")
        return took_s, *(after[count] - before[count] for count in ("num_steps", "num_calls_in_steps", "step_s"))


COLUMNS = {
    "tokens_per_s": ("tokens/s", 10, 1),
    "calls_a_step": ("calls", 7, 2),
    "step_ms": ("step ms", 9, 2),
    "fork_ms": ("fork", 7, 2),
    "pred_ms": ("pred", 8, 2),
    "close_ms": ("close", 7, 2),
    "main_us": ("main us", 9, 0),
    "steps_us": ("steps us", 9, 0),
    "client_us": ("client us", 10, 0),
}
"""Of each row: its head, its width, its digits."""
HEAD = f"{'':38}" + "".join(f"{head:>{width}}" for head, width, _ in COLUMNS.values())


def line(what: str, turns: Sequence[Found]) -> str:
    """Medians; a plain loop makes no forks and closes nothing."""
    text = f"{what:38}"
    for name, (_, width, digits) in COLUMNS.items():
        middle = statistics.median(asdict(turn)[name] for turn in turns)
        text += f"{middle:{width}.{digits}f}" if middle else f"{'-':>{width}}"
    return text


class Bench:
    def __init__(self, args: argparse.Namespace, sides: Sequence[Measured]) -> None:
        self.args = args
        self.sides = sides
        self.results: dict[str, dict[str, Any]] = {}

    def in_turns(self, part: str, cases: dict[str, tuple[Asked, int]]) -> None:
        """Run the cases on all sides, round after round; the first round warms up."""
        turns: dict[str, list[Found]] = {
            f"{what}{f', {side.name}' if side.name else ''}": [] for what in cases for side in self.sides
        }
        for number in range(self.args.rounds + 1):
            order = list(zip(turns, [(case, side) for case in cases.values() for side in self.sides], strict=True))
            for what, ((asked, num_processes), side) in order[:: 1 if number % 2 else -1]:
                found = side.turn(asked, num_processes)
                if number or self.args.quick:
                    turns[what].append(found)
            if self.args.quick:
                break
        print(f"{part}:\n{HEAD}")
        for what, each in turns.items():
            print(line(what, each), flush=True)
        self.results[part] = {what: [asdict(turn) for turn in each] for what, each in turns.items()}

    def beside_plain(self, part: str, cases: dict[str, tuple[Asked, int]]) -> None:
        """Run cases in turns, and print what share of the plain loop's rate and of its calls a step a branch gets."""
        self.in_turns(part, cases)
        for what, turns in self.results[part].items():
            if "branch" in what or "ahead" in what:
                reference = self.results[part][what.replace("branch", "plain").replace("ahead", "plain")]
                ratios = [
                    statistics.median(own[name] / other[name] for own, other in zip(turns, reference, strict=True))
                    for name in ("tokens_per_s", "calls_a_step")
                ]
                print("{}: {:.3f} of the plain rate, {:.2f} of its calls a step".format(what, *ratios), flush=True)


def asked(args: argparse.Namespace, way: str, num_streams: int, context: int = CONTEXT, think_ms: float = 0.0) -> Asked:
    return Asked(way, num_streams, context, args.warm, args.seconds, think_ms * 1e-3)


def rates(bench: Bench) -> None:
    cases = {f"{num} {way}": (asked(bench.args, way, num), 1) for num in bench.args.streams for way in WAYS}
    bench.beside_plain("rates", cases)


def contexts(bench: Bench) -> None:
    cases = {
        f"8 {way}, context {length}": (asked(bench.args, way, 8, length), 1)
        for length in bench.args.contexts
        for way in WAYS
    }
    bench.beside_plain("contexts", cases)


def processes(bench: Bench) -> None:
    cases = {f"{num} processes, {way}": (asked(bench.args, way, 1), num) for num in bench.args.streams for way in WAYS}
    bench.beside_plain("processes", cases)


def tasks(bench: Bench) -> None:
    cases = {
        f"{num} tasks, {way}": (asked(bench.args, f"task_{way}", num), 1) for num in bench.args.streams for way in WAYS
    }
    bench.beside_plain("tasks", cases)


def think(bench: Bench) -> None:
    streams, times = (THINK_STREAMS, THINK_MS) if not bench.args.quick else ((2,), (1,))
    cases = {
        f"{num} think {think_ms} ms": (asked(bench.args, "plain", num, think_ms=think_ms), 1)
        for num in streams
        for think_ms in times
    }
    bench.in_turns("think", cases)


def ahead(bench: Bench) -> None:
    bench.beside_plain("ahead", {way: (asked(bench.args, way, 1), 1) for way in ("plain", "ahead")})


def programs(bench: Bench, wanted: Mapping[str, Sequence[str]] | None = None) -> None:
    """Run programs as `symphony run` starts them, from their start to their end."""
    wanted = wanted or dict(list(PROGRAMS.items())[: 1 if bench.args.quick else None])
    rows: dict[str, list[tuple[float, ...]]] = {}
    for number in range(bench.args.rounds + 1):
        for name, arguments in wanted.items():
            for side in bench.sides:
                found = side.program(name, *arguments)
                if number or bench.args.quick:
                    rows.setdefault(f"{name}{f', {side.name}' if side.name else ''}", []).append(found)
        if bench.args.quick:
            break
    print("programs:")
    for what, each in rows.items():
        took_s, steps, calls, step_s = (statistics.median(column) for column in zip(*each, strict=True))
        in_steps = f"{steps:8.0f} steps{1e3 * step_s:8.1f} ms{calls / max(1, steps):7.2f} calls a step"
        counted = in_steps if steps else f"{calls:8.0f} tokens"
        print(f"{what:34}{took_s:8.2f} s{counted}", flush=True)
    bench.results["programs"] = dict(rows)


PARTS = {each.__name__: each for each in (rates, contexts, processes, tasks, think, ahead, programs)}


QUICK = ("rates", "tasks", "ahead", "programs")
"""The other parts are made of the same pieces."""


@contextmanager
def sides(args: argparse.Namespace, kinds: Mapping[str, Sequence[str | Path]] = KINDS) -> Iterator[list[Side]]:
    """Start a daemon of each kind for each tree."""
    trees = [("before", args.before), ("after", args.tree)] if args.before else [("", args.tree)]
    with ExitStack() as stack:
        found = []
        for (kind, symphony), (name, tree) in itertools.product(kinds.items(), trees):
            own = argparse.Namespace(**vars(args) | {"tree": tree})
            options = ("--precision", args.precision) if args.model != "tiny" else ()
            daemon = stack.enter_context(attacked(own, *options, symphony=symphony))
            found.append(Side(", ".join(filter(None, (kind, name))), daemon))
        yield found


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def arguments(description: str | None, model: str, streams: Sequence[int]) -> argparse.ArgumentParser:
    """Return a parser with the options of all that `Bench` drives."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another built checkout, to be compared with")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the built checkout that is measured")
    parser.add_argument("--model", default=model)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn, after --warm")
    parser.add_argument("--warm", type=float, default=0.7)
    parser.add_argument("--streams", type=numbers, default=list(streams))
    parser.add_argument(
        "--quick", action="store_true", help="the tiny model, one short turn of parts that make all calls"
    )
    parser.add_argument("--json", action="store_true")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.quick:
        args.model, args.seconds, args.warm, args.streams = "tiny", 0.6, 0.1, [2]
    print(f"{processor()}; {args.model}; load {os.getloadavg()[0]:.1f}")
    return args


def main() -> None:
    parser = arguments(__doc__, "smollm2", STREAMS)
    parser.add_argument("--only", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--contexts", type=numbers, default=list(CONTEXTS))
    args = parsed(parser)
    if args.quick:
        args.contexts = [31]
    with sides(args) as found:
        bench = Bench(args, found)
        for name in args.only.split(",") if args.only else QUICK if args.quick else PARTS:
            PARTS[name](bench)
    if args.json:
        print(json.dumps(bench.results))


if __name__ == "__main__":
    main()
