#!/usr/bin/env python3
"""Measure the CPU step and other engines with the same model, in turns.

    .venv/bin/python scripts/bench/decoder.py [--precision float32,bf16,int8,int4] [--peers DIR] [--only NAME,...]
        [--cases prefill-512,b1,...] [--rounds 5] [--tries 6] [--before TREE] [--roofline] [--threads N] [--isa ISA]
        [--quick] [--json]

With --before the run includes the decoder of another checkout, and with --peers the engines that were set up in DIR as
scripts/bench/peers/README.md says. Each engine is a process that lives through the run, and is stopped (SIGSTOP) while
others have their turn. Every round measures every case on every engine, one after the other, with the same random
tokens. A figure is the median over the rounds, and a ratio is the median of the ratios of single rounds. The time of a
decode does not include its prompt. A measurement is repeated if other processes used more than 6 % of the cores during
it.

The floor of a step is the least time that the machine's limits allow for its products, its attention and the bytes that
it reads. The limits are measured before each case of each round, because the speed of a machine drifts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from engines import Side, Spec, our_specs, peer_specs
from harness import Others, arguments, least_disturbed, processor, ratio, rotated
from limits import Limits, Meter
from roofline import Part, parts, table

QUIET = 0.06
"""Share of the cores that other processes may use during a measurement."""
PRECISIONS = ("float32", "bf16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    batch: int
    prompt: int
    decodes: int
    """Number of tokens that are decoded after the first token of the answer. With 0, the prompt itself is measured."""
    prefix: int = 0
    """Number of entries in a common prefix of all sequences, before their prompts."""
    repeats: int = 1
    """Number of runs in one measurement. If one run is too short for the CPU clock, a case has several."""

    @property
    def tokens(self) -> int:
        return self.repeats * self.batch * (self.decodes or self.prompt)

    @property
    def steps(self) -> int:
        return self.repeats * max(1, self.decodes)

    def requests(self, seed: str) -> list[dict[str, Any]]:
        """Return requests with prompts that no engine has seen, so that no cache of an earlier run helps."""
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
    others: float
    answers: list[dict[str, Any]]
    limits: Limits
    """Limits of the machine just before the measurement."""


def measure(side: Side, case: Case, seed: str, limits: Limits, options: argparse.Namespace) -> Sample:
    """Return the first undisturbed measurement, or the least disturbed one."""
    tries = itertools.count()

    def once() -> Sample:
        requests = case.requests(f"{seed} {next(tries)}")
        with side.running():
            others = Others(side.pids())
            answers = [side.ask(request) for request in requests]
            return Sample(sum(answer["seconds"] for answer in answers), others.share(), answers, limits)

    best = least_disturbed(once, options)
    speed, note = case.tokens / best.seconds, f"others {best.others:.0%}, {next(tries)} tries"
    print(f"  {seed:8} {case.name:13} {side.spec.name:20} {speed:9.1f} tokens/s  {note}", file=sys.stderr, flush=True)
    return best


Samples = dict[str, dict[str, list[Sample]]]
"""Samples by case, then by side."""


def measure_all(sides: list[Side], cases: list[Case], options: argparse.Namespace) -> Samples:
    meter = Meter()
    for case in cases:
        for side in sides:
            if "llamacpp" not in side.spec.name:  # its tools start again and warm up in each measurement
                measure_once(side, case)
    samples: Samples = {case.name: {side.spec.name: [] for side in sides} for case in cases}
    for number in range(options.rounds):
        for case in cases:
            limits = meter.limits(options.threads)
            for side in rotated(sides, number):
                samples[case.name][side.spec.name].append(measure(side, case, f"round {number}", limits, options))
    return samples


def measure_once(side: Side, case: Case) -> None:
    """Warm an engine up: the engine allocates scratch memory, compiles shapes and chooses its options."""
    with side.running():
        side.ask(case.requests("warm-up")[0])


def speed(case: Case, samples: list[Sample]) -> float:
    return case.tokens / statistics.median(sample.seconds for sample in samples)


def best_peer(samples: dict[str, list[Sample]], peers: list[Spec]) -> str:
    return min((peer.name for peer in peers), key=lambda name: statistics.median(s.seconds for s in samples[name]))


def speeds(sides: list[Side], cases: list[Case], samples: Samples) -> list[str]:
    lines = [f"| tokens/s | {' | '.join(case.name for case in cases)} |", "|---" * (len(cases) + 1) + "|"]
    for side in sides:
        row = [f"{speed(case, samples[case.name][side.spec.name]):.0f}" for case in cases]
        lines.append(f"| {side.spec.name} | {' | '.join(row)} |")
    return lines


def ratios(sides: list[Side], cases: list[Case], samples: Samples) -> list[str]:
    """Compare each of our decoders with the decoder of the other checkout, with the fastest peer of the same precision,
    and with the fastest peer of any precision.
    """
    peers = [side.spec for side in sides if not is_ours(side) and not is_before(side)]
    before = [side.spec for side in sides if is_before(side)]
    lines = [f"| ours to | {' | '.join(case.name for case in cases)} |", "|---" * (len(cases) + 1) + "|"]
    for side in filter(is_ours, sides):
        precision = side.spec.precision
        for what, among in (
            ("before", [spec for spec in before if spec.precision == precision]),
            (f"best {precision}", [peer for peer in peers if peer.precision == precision]),
            ("best of any precision", peers),
        ):
            if not among:
                continue
            row = []
            for case in cases:
                found = samples[case.name]
                best = best_peer(found, among)
                own_s, best_s = ([each.seconds for each in found[name]] for name in (side.spec.name, best))
                row.append(f"{ratio(best_s, own_s):.2f} ({best})")
            lines.append(f"| {side.spec.name}: {what} | {' | '.join(row)} |")
    return lines if len(lines) > 2 else []


def is_ours(side: Side) -> bool:
    return side.spec.name.startswith("ours-")


def is_before(side: Side) -> bool:
    return side.spec.name.startswith("before-")


def loadings(sides: list[Side]) -> list[str]:
    lines = ["| loading | seconds |", "|---|---|"]
    return lines + [f"| {side.spec.name} ({side.about['engine']}) | {side.about['seconds']:.2f} |" for side in sides]


def phase_seconds(sample: Sample) -> dict[str, float]:
    """Return the time of each phase that the engine reports."""
    names = sample.answers[0].get("phases", {})
    return {name: sum(answer["phases"][name] for answer in sample.answers) for name in names}


def parts_of(side: Side, case: Case) -> dict[str, Part]:
    """Return the parts of one step of a case, with their bytes and operations."""
    return parts(
        side.about,
        side.spec.precision,
        batch=case.batch,
        prefix=case.prefix,
        prompt=case.prompt,
        decodes=case.decodes,
    )


def shares(sides: list[Side], cases: list[Case], samples: Samples) -> list[str]:
    """Return a table of the time of a step, its floor, and the share of its time that the floor is."""
    head = f"| ms a step, floor, share | {' | '.join(case.name for case in cases)} |"
    lines = [head, "|---" * (len(cases) + 1) + "|"]
    for side in (side for side in sides if is_ours(side) or is_before(side)):
        row = []
        for case in cases:
            each = parts_of(side, case).values()
            times_s, floors_s = [], []
            for sample in samples[case.name][side.spec.name]:
                times_s.append(sum(phase_seconds(sample).values()) / case.steps)
                floors_s.append(sum(part.floor(sample.limits) for part in each))
            time_s, floor_s = statistics.median(times_s), statistics.median(floors_s)
            row.append(f"{time_s * 1e3:.2f}, {floor_s * 1e3:.2f}, {ratio(floors_s, times_s):.0%}")
        lines.append(f"| {side.spec.name} | {' | '.join(row)} |")
    return lines


def rooflines(sides: list[Side], cases: list[Case], samples: Samples) -> list[str]:
    lines = ["", *shares(sides, cases, samples)]
    for side in filter(is_ours, sides):
        for case in cases:
            median = sorted(samples[case.name][side.spec.name], key=lambda sample: sample.seconds)
            sample = median[len(median) // 2]
            lines += ["", f"{side.spec.name}, {case.name}:", ""]
            lines += table(parts_of(side, case), phase_seconds(sample), case.steps, sample.limits)
    return lines


def agreement(sides: list[Side], samples: Samples) -> dict[str, float]:
    """Return, for each side, the share of first tokens that equal those of the first side. All sides run the same
    model.
    """
    pairs: dict[str, list[bool]] = {}
    for found in samples.values():
        expected = [answer.get("first") for sample in found[sides[0].spec.name] for answer in sample.answers]
        for name, rows in found.items():
            got = [answer.get("first") for sample in rows for answer in sample.answers]
            for one, other in zip(expected, got, strict=True):
                pairs.setdefault(name, []).extend(a == b for a, b in zip(one or (), other or (), strict=False))
    return {name: sum(equal) / len(equal) for name, equal in pairs.items() if equal}


def conditions(threads: int, rounds: int, samples: Samples) -> list[str]:
    every = [row for found in samples.values() for rows in found.values() for row in rows]
    shares = [row.others for row in every]
    loud = sum(share > QUIET for share in shares)
    read = statistics.median(row.limits.read for row in every)
    rates = ", ".join(
        f"{name} {statistics.median(row.limits.ops[name] for row in every) / 1e9:.0f}" for name in every[0].limits.ops
    )
    return [
        f"{processor()}, {threads} threads, medians of {rounds} rounds.",
        f"Reads {read / 1e9:.1f} GB/s; G operations/s: {rates}.",
        f"Others took at most {max(shares):.0%} of the cores, more than {QUIET:.0%} in {loud} of {len(shares)}.",
    ]


def chosen(options: argparse.Namespace) -> list[Spec]:
    """Return the decoders to measure."""
    precisions = [name for name in options.precision.split(",") if name]
    specs = our_specs(options.model, precisions, options.threads, options.isa)
    if options.before:
        specs += our_specs(options.model, precisions, options.threads, options.isa, options.before)
    specs += peer_specs(options.peers, options.threads) if options.peers else []
    return [spec for spec in specs if any(part in spec.name for part in options.only.split(","))]


def main() -> None:
    parser = arguments(
        __doc__,
        before=Path,
        peers=(Path, "directory that peers/README.md's steps have filled"),
        precision=(",".join(PRECISIONS), "precisions of our decoder; empty: only the peers"),
        only=("", "names of measured engines, or parts of these names"),
        cases=",".join(case.name for case in CASES),
        rounds=5,
        tries=6,
        quiet=QUIET,
        patience=0.0,
        threads=len(os.sched_getaffinity(0)),
        model=("smollm2", "without --peers: any that symphony serves"),
        isa=("", "instruction set of our decoder; default: the best here"),
        roofline=(False, "also the floor of each step, and what bounds each part"),
        quick=(False, "the tiny model in float32 and bf16, two cases, one round, nothing beside"),
        json=False,
    )
    options = parser.parse_args()
    if options.quick:
        options.model, options.precision, options.cases = "tiny:vocab=49152", "float32,bf16", "b1,b8"
        options.rounds = options.tries = 1
    cases = [case for case in CASES if case.name in options.cases.split(",")]
    specs = chosen(options)
    if not cases or not specs:
        parser.error("nothing to measure: --cases, --precision and --only leave none")
    if unknown := set(options.precision.split(",")) - {*PRECISIONS, ""}:
        parser.error(f"--precision {','.join(unknown)}: choose from {', '.join(PRECISIONS)}")
    if options.peers and options.model != "smollm2":
        parser.error("--model: the peers are set up with smollm2")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # SIGTERM, like Ctrl-C, ends the engines first
    sides: list[Side] = []
    with tempfile.TemporaryDirectory(prefix="symphony-bench-") as logs:
        try:
            for spec in specs:
                sides.append(Side(spec, Path(logs)))
                print(f"{spec.name}: loaded in {sides[-1].about['seconds']:.1f} s", file=sys.stderr)
            samples = measure_all(sides, cases, options)
        finally:
            for side in sides:
                side.close()
    lines = conditions(options.threads, options.rounds, samples)
    equal = ", ".join(f"{name} {share:.0%}" for name, share in agreement(sides, samples).items())
    lines.append(f"First tokens as {sides[0].spec.name} chose them: {equal}.")
    for block in (speeds(sides, cases, samples), ratios(sides, cases, samples), loadings(sides)):
        lines += ["", *block] if block else []
    if options.roofline:
        lines += rooflines(sides, cases, samples)
    print("\n".join(lines))
    if options.json:
        found = {case: {name: list(map(asdict, rows)) for name, rows in each.items()} for case, each in samples.items()}
        print(json.dumps({"about": lines[:4], "samples": found}))


if __name__ == "__main__":
    main()
