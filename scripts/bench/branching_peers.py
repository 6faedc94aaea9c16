#!/usr/bin/env python3
"""Programs that branch, and plain loops, beside clients of other servers that do the same, in turns.

    .venv/bin/python scripts/bench/branching_peers.py [--server NAME=URL ...] [--group NAME=PGID ...]
        [--options NAME=JSON ...] [--only rates,programs] [--streams 1,8,64] [--rounds 5] [--seconds 2] [--json]
    .venv/bin/python scripts/bench/branching_peers.py --quick      # beside our own gateway, with the tiny model

rates      streams on a context of 297 tokens, tokens a second. branch: each token is that of a fork; plain: of a loop
           over next-token requests; streamed: of one completion. Symphony's streams are threads that call `pred()` on
           forks, `pred()`, `generate()`; the client's are tasks, which choose each token from a distribution
programs   programs of lips/: seconds, and calls in steps or tokens. `beam` and `mcts` ask for the same distributions
           everywhere, up to rounding; `best_of_n` and `tree_of_thought` draw other texts, of other lengths

A client is one process with kept connections and starts before the clock does. A program of Symphony's starts within
its seconds; `start` is that of an empty one. With its process group (`--group`) a server is stopped while others have
their turn. The first round warms up. workloads/branching_client.py has what each server is asked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "workloads"))  # its `programs` is not this directory's

from branching import (
    PROGRAMS,
    STREAMS,
    SYMPHONY,
    Bench,
    Found,
    Side,
    arguments,
    asked,
    parsed,
    programs,
    sides,
)
from branching_programs import Asked
from compare import pairs, word_tokens
from gateway import gateway
from kinds import Job
from load import Others
from sides import Served, served_side

import libsym as sym
from lips import mcts, tree_of_thought

WAYS = ("branch", "plain", "streamed")
OURS = "symphony"


@dataclass(frozen=True, slots=True)
class Peer:
    """A server, and what its client is to do."""

    name: str
    served: Served
    works: dict[str, dict[str, Any]]
    """By program."""
    ids: dict[str, int]

    def turn(self, asked: Asked, num_processes: int = 1) -> Found:
        assert num_processes == 1
        context = [1 + number % 200 for number in range(asked.context)]
        others = Others(self.served.pids())
        _, streams = self.served.run([Job("rates", asdict(asked) | {"context": context, "ids": self.ids}, 0)])
        num = sum(len(stream["tokens"]) for stream in streams)
        return Found(num / asked.seconds, *[0.0] * 8, others=others.share())

    def program(self, name: str, *arguments: str) -> tuple[float, ...]:
        assert arguments == PROGRAMS[name]
        work = self.works[name] | {"name": name, "ids": self.ids}
        began_s, [answer] = self.served.run([Job("program", work, 0)])
        print(f"  {self.name} {name}: {answer['text']!r}", file=sys.stderr)
        return answer["came_s"][-1] - began_s, 0, len(answer["tokens"]), 0.0


def works(socket: Path) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Return what the programs do, by name, with their arguments and else their defaults; and tokens by text."""
    word_tokens(socket)  # waits for the weights
    sym.connect(socket)
    ids = {text.decode(errors="replace"): token for token, text in enumerate(sym.vocabulary())}
    (capital,), (sky, _, n), (task,) = PROGRAMS["beam"], PROGRAMS["best_of_n"], PROGRAMS["tree_of_thought"]
    target, _, tokens = PROGRAMS["mcts"]
    end = sorted(sym.model_info().eos_ids)
    plan = f"Task: {task}\nA plan in 3 steps, each in one line."
    found = {
        "beam": {"prompt": sym.tokenize(capital), "width": 4, "max_tokens": 32, "end": end},
        "best_of_n": {"prompt": sym.chat_tokens([{"role": "user", "content": sky}]), "n": int(n), "max_tokens": 100},
        "tree_of_thought": {
            "prompt": sym.tokenize(plan),
            "steps": [sym.tokenize(f"\nStep {level}:") for level in (1, 2, 3)],
            "judge": sym.tokenize(tree_of_thought.JUDGE),
            "verdicts": [sym.tokenize(word)[0] for word in (" Yes", " No")],
            "breadth": 3,
            "keep": 2,
            "max_tokens": 24,
        },
        "mcts": {
            "prompt": sym.tokenize(mcts.PROMPT.format(target)),
            "digits": {each: ids[each] for each in "0123456789"},
            "signs": {each: ids[each] for each in "+-*"},
            "target": int(target),
            "tokens": int(tokens),
            "length": mcts.LENGTH,
        },
    }
    sym.close()
    return found, ids


def compared(bench: Bench, part: str, whats: Iterable[str], better: Callable[[Any, Any], float]) -> None:
    """Print how many times as fast Symphony is as each peer: medians of the ratios of one round."""
    for what in whats:
        ours, *others = (bench.results[part][f"{what}, {side.name}"] for side in bench.sides)
        for side, theirs in zip(bench.sides[1:], others, strict=True):
            print(
                f"{what}: {statistics.median(map(better, ours, theirs)):.2f} times as fast as {side.name}", flush=True
            )


def rates(bench: Bench) -> None:
    cases = {f"{num} {way}": (asked(bench.args, way, num), 1) for num in bench.args.streams for way in WAYS}
    bench.in_turns("rates", cases)
    compared(bench, "rates", cases, lambda ours, theirs: ours["tokens_per_s"] / theirs["tokens_per_s"])
    others = max(turn["others"] for turns in bench.results["rates"].values() for turn in turns)
    print(f"others took up to {others:.0%} of the cores", flush=True)


def all_programs(bench: Bench) -> None:
    programs(bench, PROGRAMS)
    compared(bench, "programs", PROGRAMS, lambda ours, theirs: theirs[0] / ours[0])
    with tempfile.NamedTemporaryFile(suffix=".py") as empty:
        ours = next(side for side in bench.sides if isinstance(side, Side))
        took_s = statistics.median(ours.program(empty.name)[0] for _ in range(3))
    print(f"start of a program: {took_s:.2f} s", flush=True)


PARTS = {"rates": rates, "programs": all_programs}


@contextmanager
def peers(args: argparse.Namespace, ours: Side) -> Iterator[list[Peer]]:
    found, ids = works(ours.daemon.socket)
    groups, options = pairs(args.group), pairs(args.options)
    with ExitStack() as stack:
        servers = pairs(args.server)
        if args.quick:
            servers["gateway"], _ = stack.enter_context(gateway(ours.daemon))
        named = []
        for name, url in servers.items():
            group = int(groups[name]) if name in groups else None
            served = stack.enter_context(served_side(name, url, group, options.get(name, "")))
            tells_ids = served.about["owner"] in ("vllm", "llamacpp")
            print(f"{name}: {served.about['owner']} {served.about['version']}")
            named.append(Peer(name, served, found, {} if tells_ids else ids))
        yield named


def main() -> None:
    parser = arguments(__doc__, "smollm2", STREAMS)
    parser.add_argument("--only", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--group", action="append", default=[], metavar="NAME=PGID", help="its process group")
    parser.add_argument("--options", action="append", default=[], metavar="NAME=JSON", help="more for each request")
    args = parsed(parser)
    with sides(args, {OURS: SYMPHONY}) as ours, peers(args, ours[-1]) as theirs:
        bench = Bench(args, [*ours, *theirs])
        for name in args.only.split(",") if args.only else PARTS:
            PARTS[name](bench)
    if args.json:
        print(json.dumps(bench.results))


if __name__ == "__main__":
    main()
