#!/usr/bin/env python3
"""Compare programs that branch (fork, `pred()`, close, again) with the same number of plain loops over `pred()`.

    .venv/bin/python scripts/bench/branching.py [--before TREE] [--only PART,...] [--rounds 5] [--quick] [--json]

A single daemon serves programs that run in turns, each in its own process. With `--before`, the daemon and the programs
of another built checkout join the turns, and each ratio compares turns of one round. The daemon counts steps, their
calls and their time; the kernel counts the processor time of the main thread and of the other threads.

rates      threads of one process: tokens a second, calls a step, times of a step, fork, pred and close, processor time
processes  the same with one stream in each process
tasks      the same with asyncio tasks of one process
beams      four forks, one pred_batch() for rows or for a few numbers, four closes; each time is of all four calls
programs   programs of lips/, unchanged: seconds in all, seconds in steps, and calls a step
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from branching_programs import Asked, window
from harness import (
    ROOT,
    SYMPHONY,
    Daemon,
    Others,
    arguments,
    chosen,
    in_turns,
    processor,
    ratio,
    read_line,
    served,
    write_line,
)

T = TypeVar("T")
HERE = Path(__file__).resolve().parent
CONTEXT = 297
STREAMS = (1, 8, 64)
WAYS = ("plain", "branch")
CALLS = ("fork", "pred", "close")
KINDS = {"": SYMPHONY}
"""Command-line arguments of Python that start each kind of daemon."""
PROGRAMS = {
    "beam": ("The capital of France is",),
    "best_of_n": ("Why is the sky blue?", "-n", "8"),
    "tree_of_thought": ("What is 3 + 4?",),
    "mcts": ("24", "--tokens", "200"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Results of one turn: rates, times of calls and of steps, and processor time for each token."""

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


@dataclass(frozen=True, slots=True)
class Side:
    """A daemon, and the tree whose programs call it."""

    name: str
    daemon: Daemon

    def processor_s(self) -> tuple[float, float]:
        """Return two processor times of the daemon: its main thread's, and the sum of all other threads."""
        spent_s = [0.0, 0.0]
        for thread in Path(f"/proc/{self.daemon.pid}/task").iterdir():
            try:
                spent = int((thread / "schedstat").read_text().split()[0]) * 1e-9
            except OSError:  # a thread that has just ended
                continue
            spent_s[thread.name != str(self.daemon.pid)] += spent
        return spent_s[0], spent_s[1]

    def turn(self, asked: Asked, num_processes: int = 1) -> Found:
        source = (HERE / "branching_programs.py").read_text()
        programs = [self.daemon.program(source, json.dumps(asdict(asked))) for _ in range(num_processes)]
        for program in programs:
            assert read_line(program) == "ready"
        since_s = time.monotonic() + 0.3
        for program in programs:
            write_line(program, f"{since_s}")
        first_s, last_s = window(asked, since_s)
        time.sleep(first_s - time.monotonic())
        others = Others((self.daemon.pid, *(program.pid for program in programs)))
        before_s = self.processor_s()
        time.sleep(last_s - time.monotonic())
        after_s, share = self.processor_s(), others.share()
        found = [json.loads(program.communicate(timeout=60)[0]) for program in programs]
        num, counted = sum(each["num"] for each in found), found[0]["grown"]
        num_steps, num_seen = max(1, counted["num_steps"]), max(1.0, 0.9 * num)
        fork_ms, pred_ms, close_ms = (
            1e3 * statistics.median(each["median_s"].get(name, 0.0) for each in found) for name in CALLS
        )
        main_us, steps_us = (1e6 * (after - before) / num_seen for before, after in zip(before_s, after_s, strict=True))
        return Found(
            num / asked.seconds,
            counted["num_calls_in_steps"] / num_steps,
            1e3 * counted["step_s"] / num_steps,
            *(fork_ms, pred_ms, close_ms, main_us, steps_us),
            1e6 * sum(each["processor_s"] for each in found) / num_seen,
            share,
        )

    def program(self, name: str, *arguments: str) -> tuple[float, ...]:
        """Run a program with `symphony run`; return its seconds, steps, calls in these steps, and seconds in steps."""
        before, began_s = self.daemon.stat(), time.monotonic()
        command = [sys.executable, "-m", "symphony.cli", "run", name, *arguments]
        environment = self.daemon.environment
        done = subprocess.run(command, env=environment, cwd=self.daemon.tree, capture_output=True, check=False)
        took_s, after = time.monotonic() - began_s, self.daemon.stat()
        steps, calls, step_s = (after[count] - before[count] for count in ("num_steps", "num_calls_in_steps", "step_s"))
        if done.returncode not in (0, 1) or not steps:  # 1: a small model may find no answer
            raise SystemExit(f"{name} ended with status {done.returncode}: {done.stderr.decode()}")
        return took_s, steps, calls, step_s


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
"""Heading, width and number of decimals of each column of the table."""
HEAD = f"{'':38}" + "".join(f"{head:>{width}}" for head, width, _ in COLUMNS.values())


def line(what: str, turns: Sequence[Found]) -> str:
    """Return a row of medians, with `-` for calls that a plain loop does not make."""
    text = f"{what:38}"
    for name, (_, width, digits) in COLUMNS.items():
        middle = statistics.median(asdict(turn)[name] for turn in turns)
        text += f"{middle:{width}.{digits}f}" if middle else f"{'-':>{width}}"
    return text


class Bench:
    def __init__(self, args: argparse.Namespace, sides: Sequence[Side]) -> None:
        self.args = args
        self.sides = sides
        self.results: dict[str, dict[str, Any]] = {}

    def turns(self, ways: dict[str, Callable[[Side], T]]) -> dict[str, list[T]]:
        """Run each way on all sides in turns. With `--quick` there is one round, and no warm-up."""
        named = {
            f"{what}{f', {side.name}' if side.name else ''}": partial(way, side)
            for what, way in ways.items()
            for side in self.sides
        }
        return in_turns(named, 1, warm=0) if self.args.quick else in_turns(named, self.args.rounds)

    def in_turns(self, part: str, cases: dict[str, tuple[Asked, int]]) -> None:
        """Run the cases on all sides, and print a line for each."""

        def turn(case: tuple[Asked, int], side: Side) -> Found:
            return side.turn(*case)

        turns = self.turns({what: partial(turn, case) for what, case in cases.items()})
        print(f"{part}:\n{HEAD}")
        for what, each in turns.items():
            print(line(what, each), flush=True)
        self.results[part] = {what: [asdict(turn) for turn in each] for what, each in turns.items()}

    def beside_plain(self, part: str, cases: dict[str, tuple[Asked, int]]) -> None:
        """Run cases in turns. Print the rate and the calls a step of programs that branch, each divided by the plain
        loops' figure.
        """
        self.in_turns(part, cases)
        for what, turns in self.results[part].items():
            if "branch" in what:
                reference = self.results[part][what.replace("branch", "plain")]
                names = ("tokens_per_s", "calls_a_step")
                ratios = [ratio(*([turn[name] for turn in each] for each in (turns, reference))) for name in names]
                print("{}: {:.3f} of the plain rate, {:.2f} of its calls a step".format(what, *ratios), flush=True)


def asked(args: argparse.Namespace, way: str, num_streams: int) -> Asked:
    return Asked(way, num_streams, CONTEXT, args.warm, args.seconds)


def rates(bench: Bench) -> None:
    cases = {f"{num} {way}": (asked(bench.args, way, num), 1) for num in bench.args.streams for way in WAYS}
    bench.beside_plain("rates", cases)


def processes(bench: Bench) -> None:
    cases = {f"{num} processes, {way}": (asked(bench.args, way, 1), num) for num in bench.args.streams for way in WAYS}
    bench.beside_plain("processes", cases)


def tasks(bench: Bench) -> None:
    cases = {
        f"{num} tasks, {way}": (asked(bench.args, f"task_{way}", num), 1) for num in bench.args.streams for way in WAYS
    }
    bench.beside_plain("tasks", cases)


def beams(bench: Bench) -> None:
    nums = (1, 8) if not bench.args.quick else (2,)
    cases = {f"{num} {way}": (asked(bench.args, way, num), 1) for num in nums for way in ("beam", "beam, numbers")}
    bench.in_turns("beams", cases)


def programs(bench: Bench) -> None:
    """Measure programs from the start of `symphony run` to its end."""
    wanted = dict(list(PROGRAMS.items())[: 1 if bench.args.quick else None])

    def run(name: str, side: Side) -> tuple[float, ...]:
        return side.program(name, *wanted[name])

    rows = bench.turns({name: partial(run, name) for name in wanted})
    print("programs:")
    for what, each in rows.items():
        took_s, steps, calls, step_s = (statistics.median(column) for column in zip(*each, strict=True))
        in_steps = f"{steps:8.0f} steps{1e3 * step_s:8.1f} ms{calls / steps:7.2f} calls a step"
        print(f"{what:34}{took_s:8.2f} s{in_steps}", flush=True)
    bench.results["programs"] = dict(rows)


PARTS = {each.__name__: each for each in (rates, processes, tasks, beams, programs)}


@contextmanager
def sides(args: argparse.Namespace, kinds: Mapping[str, Sequence[str | Path]] = KINDS) -> Iterator[list[Side]]:
    """Start a daemon of each kind for each tree."""
    trees = [("before", args.before), ("after", args.tree)] if args.before else [("", args.tree)]
    with ExitStack() as stack:
        found = []
        for (kind, symphony), (name, tree) in itertools.product(kinds.items(), trees):
            options = ("--precision", args.precision) if args.model != "tiny" else ()
            daemon = stack.enter_context(served(args.model, *options, tree=tree, symphony=symphony))
            found.append(Side(", ".join(filter(None, (kind, name))), daemon))
        yield found


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def options(description: str | None, model: str, streams: Sequence[int], **more: Any) -> argparse.ArgumentParser:
    """Return a parser of the options that `Bench` needs, and of `more` options."""
    parser = arguments(
        description,
        before=Path,
        tree=ROOT,
        model=model,
        precision="bf16",
        rounds=5,
        seconds=(2.0, "of each turn, after --warm"),
        warm=0.7,
        **more,
        quick=(False, "the tiny model, one short turn of parts that make all calls"),
        json=False,
    )
    parser.add_argument("--streams", type=numbers, default=list(streams))
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.quick:
        args.model, args.seconds, args.warm, args.streams = "tiny", 0.2, 0.1, [2]
    print(f"{processor()}; {args.model}; load {os.getloadavg()[0]:.1f}")
    return args


def main() -> None:
    args = parsed(options(__doc__, "smollm2", STREAMS, only=",".join(PARTS)))
    names = chosen(args.only, PARTS)
    with sides(args) as found:
        bench = Bench(args, found)
        for name in names:
            PARTS[name](bench)
    if args.json:
        print(json.dumps(bench.results))


if __name__ == "__main__":
    main()
