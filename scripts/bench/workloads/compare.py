#!/usr/bin/env python3
"""Does the same work with Symphony's programs and with clients of other servers, in turns.

    .venv/bin/python scripts/bench/workloads/compare.py [--only plain,react,...] [--scale 1] [--rounds 3] [--quick]
        [--precision bf16,int8] [--server NAME=URL ...] [--group NAME=PGID ...] [--options NAME=JSON ...]
        [--model smollm2] [--save NAME] [--json]

README.md tells what the workloads are and how servers are started. Every round does each workload on every side, one
after the other and another one first each time, with prompts that nobody has seen; figures are medians over the rounds
with the least and the most. Runs that others disturbed (more than --quiet of the cores) are repeated (`--tries`).
`--save NAME` writes results/NAME.json, .txt and .svg.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "crowds"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

import branches
import mix
import plain
import plot
import react
import shared
import structured
from attacked import ROOT, processor
from kinds import Job, Words
from load import Others, wait_for_quiet
from programs.work import Answer
from sides import Served, Side, served_side, symphony_side

import libsym as sym

RESULTS = ROOT / "scripts" / "bench" / "results"
WORKLOADS: dict[str, ModuleType] = {
    "plain": plain,
    "shared": shared,
    "branches": branches,
    "react": react,
    "structured": structured,
    "mix": mix,
}
QUICK_SCALE = 1 / 16


@dataclass(frozen=True, slots=True)
class Sample:
    """One workload, once, on one side."""

    wall_s: float
    """From handing out the jobs to the last token of all."""
    tokens_per_s: float
    first_p50_s: float
    """From asking for a sequence to its first token."""
    first_max_s: float
    gap_p50_ms: float
    """Between tokens of one sequence."""
    gap_p99_ms: float
    load: float
    """Of the machine, over the last minute before it."""
    others: float
    """The share of the cores that others took meanwhile, as far as it is known."""


def measure(side: Side, jobs: list[Job]) -> Sample:
    load, others = os.getloadavg()[0], Others(side.pids())
    began_s, answers = side.run(jobs)
    share = others.share()
    num_tokens = sum(len(answer["tokens"]) for answer in answers)
    expected = sum(job.num_tokens for job in jobs)
    if num_tokens != expected:
        raise SystemExit(f"{side.name} gave {num_tokens} tokens, {expected} were asked for: not the same work")
    wall_s = max(answer["came_s"][-1] for answer in answers) - began_s
    firsts = sorted(answer["came_s"][0] - answer["asked_s"] for answer in answers)
    gaps = sorted(gap for answer in answers for gap in gaps_of(answer))
    return Sample(
        wall_s,
        num_tokens / wall_s,
        statistics.median(firsts),
        firsts[-1],
        gaps[len(gaps) // 2] * 1e3,
        gaps[len(gaps) * 99 // 100] * 1e3,
        load,
        share,
    )


def gaps_of(answer: Answer) -> list[float]:
    return [after - before for before, after in zip(answer["came_s"], answer["came_s"][1:], strict=False)]


Samples = dict[str, dict[str, list[Sample]]]
"""By workload, by side."""


def measure_all(
    sides: list[Side], tokens: list[int], args: argparse.Namespace, keep: Callable[[Samples], None]
) -> Samples:
    """`keep` takes what is complete whenever all sides have done a workload: a run may be ended early."""
    names: list[str] = args.only.split(",") if args.only else list(WORKLOADS)
    samples: Samples = {name: {side.name: [] for side in sides} for name in names}
    for side in sides:  # warms up: libraries, kernels that are compiled for the first request
        side.run(WORKLOADS["plain"].jobs(QUICK_SCALE, Words(tokens, f"{time.time()}")))
    for number in range(args.rounds):
        for name in names:
            for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                samples[name][side.name].append(least_disturbed(side, name, number, tokens, args))
            keep({done: by_side for done, by_side in samples.items() if all(by_side.values())})
    return samples


def least_disturbed(side: Side, name: str, number: int, tokens: list[int], args: argparse.Namespace) -> Sample:
    found: list[Sample] = []
    while not found or (found[-1].others > args.quiet and len(found) < args.tries):
        wait_for_quiet(args.quiet, args.patience)
        words = Words(tokens, f"{name}-{number}-{len(found)}-{args.seed}")
        found.append(measure(side, WORKLOADS[name].jobs(args.scale, words)))
    best = min(found, key=lambda sample: sample.others)
    note = f"load {best.load:.1f}, others {best.others:.0%}, {len(found)} tries"
    print(f"  {number} {name:11}{side.name:18}{best.tokens_per_s:9.1f} tokens/s  {note}", file=sys.stderr, flush=True)
    return best


def table(samples: Samples, heading: str) -> str:
    lines = [heading, ""]
    lines.append(
        f"{'workload':12}{'side':18}{'tokens/s':>9}  {'least to most':>15}{'ratio':>7}{'wall s':>8}"
        f"{'first p50 s':>12}{'gap p50 ms':>11}{'p99':>8}{'load':>6}{'others':>8}"
    )
    for name, by_side in samples.items():
        base = next(iter(by_side.values()))
        for side, runs in by_side.items():
            rates = [run.tokens_per_s for run in runs]
            ratio = statistics.median(own.tokens_per_s / run.tokens_per_s for own, run in zip(base, runs, strict=True))
            middle = {key: statistics.median(asdict(run)[key] for run in runs) for key in asdict(runs[0])}
            lines.append(
                f"{name:12}{side:18}{statistics.median(rates):>9.1f}  {f'{min(rates):.0f} to {max(rates):.0f}':>15}"
                f"{ratio:>7.2f}{middle['wall_s']:>8.2f}{middle['first_p50_s']:>12.3f}{middle['gap_p50_ms']:>11.2f}"
                f"{middle['gap_p99_ms']:>8.1f}{middle['load']:>6.1f}{middle['others']:>8.0%}"
            )
    lines += ["", "ratio: of the first side's tokens/s to this side's, the median of the rounds'."]
    return "\n".join(lines) + "\n"


def plain_of(samples: Samples) -> dict[str, Any]:
    return {
        "samples": {
            name: {side: [asdict(run) for run in runs] for side, runs in by_side.items()}
            for name, by_side in samples.items()
        }
    }


def save(path: Path, samples: Samples, heading: str, facts: dict[str, Any]) -> None:
    path.with_name(f"{path.name}.json").write_text(json.dumps(facts | plain_of(samples), indent=1) + "\n")
    path.with_name(f"{path.name}.txt").write_text(table(samples, heading))
    rates = {
        name: {side: [run.tokens_per_s for run in runs] for side, runs in by_side.items()}
        for name, by_side in samples.items()
    }
    path.with_name(f"{path.name}.svg").write_text(plot.bars(rates, heading))


def word_tokens(socket: Path) -> list[int]:
    """Tokens that are a word with a space before it: what they say together is split into the same tokens again."""
    sym.connect(socket)
    while sym.daemon_stat()["weights"] != "loaded":
        time.sleep(0.05)
    found = [token for token, text in enumerate(sym.vocabulary()) if re.fullmatch(rb" [a-z]{2,}", text)]
    sym.close()
    return found


def pairs(words: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", help=f"some of {', '.join(WORKLOADS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="of how many sequences there are")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round at a sixteenth of the size")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", default="bf16", help="of Symphony; several with commas are several sides")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the built checkout whose daemon is measured")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--group", action="append", default=[], metavar="NAME=PGID", help="its process group")
    parser.add_argument("--options", action="append", default=[], metavar="NAME=JSON", help="more for each request")
    parser.add_argument("--quiet", type=float, default=0.1, help="share of the cores that others may take")
    parser.add_argument("--tries", type=int, default=3, help="turns of which the least disturbed counts")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that a turn waits for a quiet machine")
    parser.add_argument("--seed", default=str(int(time.time())), help="of the prompts")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json, .txt and .svg")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.scale, args.rounds = min(args.scale, QUICK_SCALE), 1
    groups, options = pairs(args.group), pairs(args.options)
    with contextlib.ExitStack() as stack:
        sides: list[Side] = []
        about: dict[str, Any] = {}
        tokens: list[int] = []
        for precision in args.precision.split(","):
            side, daemon = stack.enter_context(symphony_side(precision, args.model, args.tree, ()))
            tokens = tokens or word_tokens(daemon.socket)
            sides.append(side)
        for name, url in pairs(args.server).items():
            group = int(groups[name]) if name in groups else None
            served: Served = stack.enter_context(served_side(name, url, group, options.get(name, "")))
            about[name] = served.about
            sides.append(served)
        heading = f"{processor()}; {args.model}; scale {args.scale:g}; {time.strftime('%Y-%m-%d')}"
        facts = {
            "processor": processor(),
            "model": args.model,
            "scale": args.scale,
            "seed": args.seed,
            "servers": about,
        }

        def keep(samples: Samples) -> None:
            if args.save:
                save(RESULTS / args.save, samples, heading, facts)

        samples = measure_all(sides, tokens, args, keep)
    print(json.dumps(facts | plain_of(samples), indent=1) if args.json else table(samples, heading), end="")


if __name__ == "__main__":
    main()
