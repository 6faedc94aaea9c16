#!/usr/bin/env python3
"""What steps do under every kind of load, beside a plain loop over the same decoder that has all prompts in hand.

    .venv/bin/python scripts/bench/steps.py [--only streams,json,delay,many,mixed,fair] [--quick] [--rounds 5]
        [--precision int8,bf16] [--model smollm2] [--threads N] [--quiet 0.1] [--save NAME] [--json]

A daemon, programs in processes of their own, and the loop in another one take turns; each round's ratio is from its
own turns. Figures say which load of the machine they met. A turn that others disturbed (by more than --quiet of the
cores) is repeated (`--tries`). `--save NAME` writes results/NAME.json and .txt, part by part;
what they have of other parts and precisions stays.

streams  64 equal streams: pred() from 64 processes, generate(), generate() with stop texts that never come
json     the same with a JSON schema; the loop appends the same stretches in the same number of steps
delay    p99 between tokens of 8 decodes while 4,000-token prefills run back to back, and what these pay
many     300 streams
mixed    short, long, tool-waiting and masked at once, with the daemon's own numbers
fair     what equal accounts get when they want unequal much, and accounts of weights 1:2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parent / "crowds"))

from attacked import ROOT, processor
from steps_bench import Bench, benched
from steps_parts import ACCOUNTS, PARTS, weights

import libsym as sym

RESULTS = Path(__file__).resolve().parent / "results"
Results = dict[str, dict[str, dict[str, Any]]]
"""By precision, by part."""


def run(args: argparse.Namespace, precision: str, keep: Callable[[str, dict[str, Any]], None]) -> None:
    """`keep` takes each part's result as it comes."""
    names = args.only.split(",") if args.only else list(PARTS)
    print(f"{precision}:", file=sys.stderr)
    with benched(args, precision) as bench:
        for name in names:
            PARTS[name](bench)
            result = result_of(bench)
            if name == names[-1]:
                result["cost_model"] = sym.daemon_stat().get("cost_model", "this daemon has none")
            keep(name, result)
    if "fair" not in names:
        return
    if has_weights():
        with benched(args, precision, "--weight", f"{ACCOUNTS[0]}=1", "--weight", f"{ACCOUNTS[1]}=2") as bench:
            weights(bench)
            keep("weights", result_of(bench))
    else:
        print("  SKIPPED: weights 1:2. This daemon has no --weight UID=N.", file=sys.stderr)
        keep("weights", {"skipped": "this daemon has no --weight UID=N"})


def result_of(bench: Bench) -> dict[str, Any]:
    """What was found since it was asked last."""
    rows = [asdict(row) | {"ratio": row.ratio, "line": row.line()} for row in bench.rows]
    result = {
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "rows": rows,
        "details": dict(bench.details),
        "load": round(max(bench.loads, default=0.0), 2),
        "others": [round(share, 3) for share in bench.others],
    }
    for found in (bench.rows, bench.details, bench.loads, bench.others):
        found.clear()
    return result


def has_weights() -> bool:
    command = [sys.executable, "-m", "symphony.cli", "serve", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    return "--weight" in done.stdout


def text_of(results: Results, heading: str) -> str:
    lines = [heading]
    for precision, parts in results.items():
        lines += ["", f"{precision}:"]
        for name, result in parts.items():
            if "skipped" in result:
                lines += [f"{name}: skipped, {result['skipped']}"]
                continue
            others = f"{min(result['others']):.0%} to {max(result['others']):.0%}"
            lines += [f"{name}: {result['when']}, load up to {result['load']}, others took {others} of the cores"]
            lines += [f"  {row['line']}" for row in result["rows"]]
            lines += [f"  {what}: {json.dumps(value)}" for what, value in result["details"].items()]
            if "cost_model" in result:
                lines += [f"  cost model: {json.dumps(result['cost_model'])}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="two rounds of less")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", default="int8,bf16")
    parser.add_argument("--threads", type=int, help="of daemon and loop (default: the cores given)")
    parser.add_argument("--pages", type=int, default=1024, help="of the loop's arena")
    parser.add_argument("--quiet", type=float, default=0.1, help="share of the cores that others may take")
    parser.add_argument("--tries", type=int, default=3, help="turns of which the least disturbed counts")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that a turn waits for a quiet machine")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the built checkout whose daemon is measured")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and .txt")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.rounds = min(args.rounds, 2)
    heading = f"{processor()}; {args.model}"
    path = RESULTS / f"{args.save}.json"
    results: Results = {}
    if args.save and path.exists():
        known = json.loads(path.read_text())
        if (known["processor"], known["model"]) != (processor(), args.model):
            raise SystemExit(f"{path} is of {known['processor']}, {known['model']}: take another name")
        results = known["precisions"]
    for precision in args.precision.split(","):

        def keep(name: str, result: dict[str, Any], precision: str = precision) -> None:
            results.setdefault(precision, {})[name] = result
            if args.save:
                whole = {"processor": processor(), "model": args.model, "precisions": results}
                path.write_text(json.dumps(whole, indent=1) + "\n")
                path.with_suffix(".txt").write_text(text_of(results, heading))

        run(args, precision, keep)
    whole = {"processor": processor(), "model": args.model, "precisions": results}
    print(json.dumps(whole, indent=1) if args.json else text_of(results, heading), end="")


if __name__ == "__main__":
    main()
