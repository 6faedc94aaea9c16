#!/usr/bin/env python3
"""Measures the CPU step beside other engines on the same model, in turns, in one run.

    .venv/bin/python scripts/bench/decoder.py [--precision float32,bf16,int8,int4] [--peers DIR] [--only NAME,...]
        [--cases prefill-512,b1,...] [--rounds 5] [--tries 6] [--roofline] [--threads N] [--isa ISA] [--json FILE]

Without --peers, transformers' generate is beside it; with --peers, the engines that were set up in DIR as
scripts/bench/peers/README.md says. Each engine is a process that lives through the run and is stopped while
others have their turn. Every round measures every case on every engine, one after the other, with the same random
tokens; the figures are medians over the rounds, a ratio is the median of the rounds' ratios. The time of a decode
leaves its prompt out. A measurement during which other processes took more than 6 % of the cores is repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from limits import Limits, Meter
from roofline import parts, table
from sides import Disturbance, Side, Spec, our_specs, peer_specs, transformers_specs

QUIET = 0.06
"""Share of the cores that others may take during a measurement that counts."""
PRECISIONS = ("float32", "bf16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    batch: int
    prompt: int
    decodes: int
    """Tokens after the prompt's first; 0: the prompt itself is what is timed."""
    prefix: int = 0
    """Entries that all sequences share, before their prompts."""
    repeats: int = 1
    """Runs in one measurement, where one would be too short for the CPU clock."""

    @property
    def tokens(self) -> int:
        return self.repeats * self.batch * (self.decodes or self.prompt)

    def requests(self, seed: str) -> list[dict[str, Any]]:
        """Prompts that no engine has seen, so that no cache of an earlier run helps."""
        rng = random.Random(f"{self.name} {seed}")

        def tokens(count: int) -> list[int]:
            return [rng.randrange(1_000, 48_000) for _ in range(count)]

        prefix = tokens(self.prefix)
        return [
            {
                "do": "run",
                "prefix": prefix,
                "prompts": [tokens(self.prompt) for _ in range(self.batch)],
                "decodes": self.decodes,
            }
            for _ in range(self.repeats)
        ]


CASES = (
    Case("prefill-512", 1, 512, 0, repeats=4),
    Case("prefill-2048", 1, 2048, 0),
    Case("b1", 1, 128, 48),
    Case("b8", 8, 128, 32),
    Case("b32", 32, 128, 24),
    Case("b64", 64, 128, 16),
    Case("shared", 32, 16, 24, prefix=2048),
)


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    disturbance: float
    answers: list[dict[str, Any]]


def measure(side: Side, case: Case, seed: str, tries: int) -> Sample:
    """The first undisturbed measurement, or the least disturbed one."""
    samples: list[Sample] = []
    for attempt in range(tries):
        requests = case.requests(f"{seed} {attempt}")
        with side.running():
            others = Disturbance(side)
            answers = [side.ask(request) for request in requests]
            samples.append(Sample(sum(answer["seconds"] for answer in answers), others.share(), answers))
        if samples[-1].disturbance <= QUIET:
            break
    best = min(samples, key=lambda sample: sample.disturbance)
    speed = case.tokens / best.seconds
    note = f"others {best.disturbance:.0%}, {len(samples)} tries"
    print(f"  {seed:8} {case.name:13} {side.spec.name:20} {speed:9.1f} tokens/s  {note}", file=sys.stderr, flush=True)
    return best


Samples = dict[str, dict[str, list[Sample]]]
"""By case, by side."""


def measure_all(
    sides: list[Side], cases: list[Case], meter: Meter, options: argparse.Namespace
) -> tuple[Samples, Limits]:
    for case in cases:
        for side in sides:
            if "llamacpp" not in side.spec.name:  # its tools start afresh, and warm up, for every measurement
                measure_once(side, case)
    samples: Samples = {case.name: {side.spec.name: [] for side in sides} for case in cases}
    limits: list[Limits] = []
    for number in range(options.rounds):
        limits.append(meter.limits(options.threads))
        for case in cases:
            # Each round begins with another, so that none always follows the same one.
            first = number % len(sides)
            for side in sides[first:] + sides[:first]:
                samples[case.name][side.spec.name].append(measure(side, case, f"round {number}", options.tries))
    read = statistics.median(each.read for each in limits)
    return samples, Limits(read, {name: max(each.ops[name] for each in limits) for name in limits[0].ops})


def measure_once(side: Side, case: Case) -> None:
    """Before what counts: scratch memory, compiled shapes, an engine's choice of its own options."""
    with side.running():
        side.ask(case.requests("warm-up")[0])


def speed(case: Case, samples: list[Sample]) -> float:
    return case.tokens / statistics.median(sample.seconds for sample in samples)


def ratio(ours: list[Sample], peer: list[Sample]) -> float:
    return statistics.median(b.seconds / a.seconds for a, b in zip(ours, peer, strict=True))


def best_peer(samples: dict[str, list[Sample]], peers: list[Spec]) -> str:
    return min((peer.name for peer in peers), key=lambda name: statistics.median(s.seconds for s in samples[name]))


def speeds(sides: list[Side], cases: list[Case], samples: Samples) -> list[str]:
    lines = [f"| tokens/s | {' | '.join(case.name for case in cases)} |", "|---" * (len(cases) + 1) + "|"]
    for side in sides:
        row = [f"{speed(case, samples[case.name][side.spec.name]):.0f}" for case in cases]
        lines.append(f"| {side.spec.name} | {' | '.join(row)} |")
    return lines


def ratios(sides: list[Side], cases: list[Case], samples: Samples) -> list[str]:
    """Ours to the best peer of the same precision, and to the best of any."""
    peers = [side.spec for side in sides if not is_ours(side)]
    lines = [f"| ours to | {' | '.join(case.name for case in cases)} |", "|---" * (len(cases) + 1) + "|"]
    for side in filter(is_ours, sides):
        precision = side.spec.precision
        for what, among in (
            (f"best {precision}", [peer for peer in peers if peer.precision == precision]),
            ("best of any precision", peers),
        ):
            if not among:
                continue
            row = []
            for case in cases:
                found = samples[case.name]
                best = best_peer(found, among)
                row.append(f"{ratio(found[side.spec.name], found[best]):.2f} ({best})")
            lines.append(f"| {side.spec.name}: {what} | {' | '.join(row)} |")
    return lines if len(lines) > 2 else []


def is_ours(side: Side) -> bool:
    return side.spec.name.startswith("ours-")


def loadings(sides: list[Side]) -> list[str]:
    lines = ["| loading | seconds | MiB before | MiB at most | of it anonymous |", "|---" * 5 + "|"]
    for side in sides:
        it = side.loading
        sizes = " | ".join(str(round(size / 2**20)) for size in (it.before, it.peak, it.peak_anonymous))
        lines.append(f"| {side.spec.name} ({it.about['engine']}) | {it.seconds:.2f} | {sizes} |")
    return lines


def phase_seconds(sample: Sample) -> dict[str, float]:
    """Where the time went, as far as the engine tells."""
    names = sample.answers[0].get("phases", {})
    return {name: sum(answer["phases"][name] for answer in sample.answers) for name in names}


def rooflines(sides: list[Side], cases: list[Case], samples: Samples, limits: Limits) -> list[str]:
    lines = []
    for side in filter(is_ours, sides):
        about, precision = side.loading.about, side.spec.precision
        for case in cases:
            median = sorted(samples[case.name][side.spec.name], key=lambda sample: sample.seconds)
            phases = phase_seconds(median[len(median) // 2])
            each = parts(
                about, precision, batch=case.batch, prefix=case.prefix, prompt=case.prompt, decodes=case.decodes
            )
            lines += ["", f"{side.spec.name}, {case.name}:", ""]
            lines += table(each, phases, case.repeats * max(1, case.decodes), limits)
    return lines


def agreement(sides: list[Side], samples: Samples) -> dict[str, float]:
    """The share of first tokens that each side chose as the first side did: all compute the same model."""
    pairs: dict[str, list[bool]] = {}
    for found in samples.values():
        expected = [answer.get("first") for sample in found[sides[0].spec.name] for answer in sample.answers]
        for name, rows in found.items():
            got = [answer.get("first") for sample in rows for answer in sample.answers]
            for one, other in zip(expected, got, strict=True):
                pairs.setdefault(name, []).extend(a == b for a, b in zip(one or (), other or (), strict=False))
    return {name: sum(equal) / len(equal) for name, equal in pairs.items() if equal}


def conditions(threads: int, rounds: int, samples: Samples, limits: Limits) -> list[str]:
    shares = [row.disturbance for found in samples.values() for rows in found.values() for row in rows]
    loud = sum(share > QUIET for share in shares)
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in limits.ops.items())
    return [
        f"{processor()}, {threads} threads, medians of {rounds} rounds.",
        f"Reads {limits.read / 1e9:.1f} GB/s; G operations/s: {rates}.",
        f"Others took at most {max(shares):.0%} of the cores, more than {QUIET:.0%} in {loud} of {len(shares)}.",
    ]


def report(sides: list[Side], cases: list[Case], samples: Samples, limits: Limits, threads: int) -> dict[str, Any]:
    return {
        "machine": {"processor": processor(), "threads": threads, "kernel": platform.release()},
        "limits": dataclasses.asdict(limits),
        "cases": {case.name: dataclasses.asdict(case) for case in cases},
        "sides": {side.spec.name: dataclasses.asdict(side.loading) for side in sides},
        "same_first_tokens": agreement(sides, samples),
        "tokens_per_second": {
            case.name: {name: speed(case, rows) for name, rows in samples[case.name].items()} for case in cases
        },
        "rounds": {
            case: {
                name: [
                    {"seconds": row.seconds, "others": row.disturbance, "phases": phase_seconds(row)} for row in rows
                ]
                for name, rows in found.items()
            }
            for case, found in samples.items()
        },
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def chosen(options: argparse.Namespace) -> list[Spec]:
    """What is measured; without --peers each precision that transformers has is beside ours."""
    precisions = [name for name in options.precision.split(",") if name]
    specs = our_specs(options.model, precisions, options.threads, options.isa)
    if options.peers:
        specs += peer_specs(options.peers, options.threads)
    else:
        specs += transformers_specs(options.model, options.threads)
    wanted = options.only.split(",")
    return [spec for spec in specs if any(part in spec.name for part in wanted)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", type=Path, help="directory that peers/README.md's steps have filled")
    parser.add_argument("--precision", default=",".join(PRECISIONS), help="of ours; empty: only the peers")
    parser.add_argument("--only", default="", help="names, or parts of names, of what is measured")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tries", type=int, default=6, help="before the least disturbed measurement is taken as it is")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="smollm2", help="without --peers: any that symphony serves")
    parser.add_argument("--isa", default="", help="of ours; default: the best here")
    parser.add_argument("--roofline", action="store_true", help="also what bounds each part of our step")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    cases = [case for case in CASES if case.name in options.cases.split(",")]
    specs = chosen(options)
    if not cases or not specs:
        parser.error("nothing to measure: --cases, --precision and --only leave none")
    if unknown := set(options.precision.split(",")) - {*PRECISIONS, ""}:
        parser.error(f"--precision {','.join(unknown)}: choose from {', '.join(PRECISIONS)}")
    if options.peers and options.model != "smollm2":
        parser.error("--model: the peers are set up with smollm2")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: the engines end first
    meter = Meter()
    sides: list[Side] = []
    with tempfile.TemporaryDirectory(prefix="symphony-bench-") as logs:
        try:
            for spec in specs:
                sides.append(Side(spec, Path(logs)))
                print(f"{spec.name}: loaded in {sides[-1].loading.seconds:.1f} s", file=sys.stderr)
            samples, limits = measure_all(sides, cases, meter, options)
        finally:
            for side in sides:
                side.close()
    lines = conditions(options.threads, options.rounds, samples, limits)
    equal = ", ".join(f"{name} {share:.0%}" for name, share in agreement(sides, samples).items())
    lines.append(f"First tokens as {sides[0].spec.name} chose them: {equal}.")
    for block in (speeds(sides, cases, samples), ratios(sides, cases, samples), loadings(sides)):
        lines += ["", *block] if block else []
    if options.roofline:
        lines += rooflines(sides, cases, samples, limits)
    print("\n".join(lines))
    if options.json:
        found = report(sides, cases, samples, limits, options.threads)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
