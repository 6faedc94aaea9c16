#!/usr/bin/env python3
"""Workloads whose KV is several times memory, by policy and beside other servers, in turns.

    .venv/bin/python scripts/bench/workloads/pressure.py [--only rag,sessions,resumes,crowd,editor,restart] [--rounds 1]
        [--index 3,1,0.5] [--policies lru,ttl,idle,cost] [--kv-tokens 11648] [--scale 1] [--quick]
        [--server NAME=URL ...] [--group NAME=PGID ...] [--slots NAME=DIR] [--save NAME]

README.md tells what they are and how servers are started with as much memory for KV. Figures are of all answers of all
rounds. `--save NAME` writes results/NAME.json, .txt and .svg; what is there of other cases stays.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "crowds"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

import curves
import editor
import rag
import restart
import sessions
from attacked import ROOT, processor
from kinds import Job, Words
from latencies import Sample, measure, table
from load import wait_for_quiet
from policies import Policy, policed
from sides import Served, Side, served_side

import libsym as sym

RESULTS = ROOT / "scripts" / "bench" / "results"
WORKLOADS = "rag", "sessions", "resumes", "crowd", "editor", "restart"
QUICK_SCALE, QUICK_HASTE = 1 / 8, 20.0
CROWD_SHARE = 10
"""Times as much KV as memory."""
RESUMES_SHARE = 2
AMPLE = 1.5
"""Times as much memory as KV, for what there would be without pressure."""

Samples = dict[str, dict[str, Sample]]
"""By case, by side."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What all workloads of a run have."""

    args: argparse.Namespace
    tokens: list[int]
    """Of words."""
    entry_bytes: int
    servers: list[Served]
    samples: Samples
    keep: Callable[[Samples], None]
    """Writes down what there is: a run may be ended early."""

    def words(self, name: str) -> Words:
        return Words(self.tokens, f"{name}-{self.args.seed}")

    @contextmanager
    def sides(self, kv_tokens: int, kinds: list[tuple[str, str, str]]) -> Iterator[list[Side]]:
        """One daemon with so much memory for KV, with each (name, policy, what the program keeps); and the servers."""
        memory = str(kv_tokens * self.entry_bytes)
        with policed(self.args.model, ROOT, self.args.precision, "--kv-memory", memory) as daemon:
            ours: list[Side] = [Policy(f"symphony-{name}", daemon, policy, keeps) for name, policy, keeps in kinds]
            yield [*ours, *self.servers]

    def turn(self, case: str, side: Side, jobs: list[Job]) -> None:
        """One workload, once, on one side; samples are by the labels of the answers."""
        wait_for_quiet(self.args.quiet, self.args.patience)
        for label, sample in measure(side, jobs).items():
            by_side = self.samples.setdefault(f"{case} {label}".strip(), {})
            by_side[side.name] = by_side[side.name].joined(sample) if side.name in by_side else sample
            print(table({f"{case} {label}".strip(): {side.name: sample}}).splitlines()[1], file=sys.stderr, flush=True)
        self.keep(self.samples)

    def turns(self, case: str, sides: list[Side], make: Callable[[Words], list[Job]]) -> None:
        for number in range(self.args.rounds):
            first = number % len(sides)
            for side in sides[first:] + sides[:first]:
                self.turn(case, side, make(self.words(f"{case}-{number}")))


def run_rag(machine: Machine) -> None:
    args = machine.args
    scale = max(args.scale, 0.25)
    documents = rag.corpus(scale, machine.words("corpus"))
    kv_tokens = round(args.kv_tokens * max(scale, 0.5))
    room = kv_tokens - rag.NUM_CLIENTS * (rag.DOCUMENT_TOKENS + rag.QUESTION_TOKENS + rag.NUM_TOKENS + 32)
    kinds = [("none", "", "none"), ("own", "", "own")]
    kinds += [(policy, policy, "daemon") for policy in args.policies] + [("pinned", args.policies[-1], "pinned")]
    with machine.sides(kv_tokens, [kind for kind in kinds if kind[0] in args.rag_sides]) as sides:
        for index in args.index:

            def make(words: Words, index: float = index) -> list[Job]:
                jobs = rag.jobs(args.scale, words, documents, f"corpus-{args.seed}", index)
                return [
                    dataclasses.replace(job, work=job.work | {"room_tokens": room, "pin_tokens": kv_tokens // 2})
                    for job in jobs
                ]

            machine.turns(f"rag {index:g}", sides, make)


def run_sessions(machine: Machine) -> None:
    args = machine.args
    kinds = [(policy, policy, "") for policy in args.policies]
    haste = QUICK_HASTE if args.quick else 1.0

    def make(words: Words) -> list[Job]:
        return sessions.jobs(args.scale, words, sessions.AGENTS, sessions.PEOPLE, haste=haste)

    with machine.sides(round(args.kv_tokens * args.scale), kinds) as sides:
        machine.turns("sessions", sides, make)


def run_resumes(machine: Machine) -> None:
    """Pauses that are much alike, without a word of the program's: is a file back before it is used?"""
    args = machine.args
    haste = QUICK_HASTE if args.quick else 1.0

    def make(words: Words) -> list[Job]:
        return sessions.jobs(max(args.scale, 0.25), words, sessions.REGULAR, haste=haste)

    kv_tokens = sessions.kv_tokens(make(machine.words("size"))) // RESUMES_SHARE
    with machine.sides(kv_tokens, [(policy, policy, "") for policy in args.policies]) as sides:
        for number in range(args.rounds):
            for side in sides[: len(args.policies)]:
                machine.turn("resumes", side, make(machine.words(f"resumes-{number}")))


def run_crowd(machine: Machine) -> None:
    """Ten times more KV than memory; and the same with enough of it."""
    args = machine.args
    scale = max(args.scale, 0.25)  # a tenth has to have room for one

    def make(words: Words) -> list[Job]:
        return sessions.jobs(scale, words, sessions.CROWD)

    kv_tokens = sessions.kv_tokens(make(machine.words("size")))
    for number in range(args.rounds):
        places = [("ample", round(kv_tokens * AMPLE)), ("tenth", kv_tokens // CROWD_SHARE)]
        for name, size in places[:: -1 if number % 2 else 1]:
            with machine.sides(size, [(f"{args.policies[-1]}-{name}", args.policies[-1], "")]) as sides:
                machine.turn("crowd", sides[0], make(machine.words(f"crowd-{number}")))
        for side in machine.servers:
            machine.turn("crowd", side, make(machine.words(f"crowd-{number}")))


def run_editor(machine: Machine) -> None:
    args = machine.args
    with machine.sides(args.kv_tokens, [(args.policies[-1], args.policies[-1], "")]) as sides:
        machine.turns("editor", sides, lambda words: editor.jobs(args.scale, words))


def run_restart(machine: Machine) -> None:
    args = machine.args
    num_tokens = round(restart.NUM_TOKENS * args.scale)
    memory = str((num_tokens + 256) * 2 * machine.entry_bytes)
    options = "--kv-memory", memory
    words = machine.words("restart")
    ours = restart.symphony(args.model, args.precision, options, words, num_tokens, args.rounds)
    answers = [("symphony", way, answer) for way, answer in ours]
    for number in range(args.rounds):
        for side in machine.servers:
            words, slots = machine.words(f"restart-{number}"), args.slots.get(side.name)
            with side.awake():
                served = restart.serve(args.server[side.name], words, num_tokens, Path(slots) if slots else None)
            answers += [(side.name, way, answer) for way, answer in served.items()]
    for name, way, answer in answers:
        by_side, sample = machine.samples.setdefault(f"restart {way}", {}), Sample.of([answer])
        by_side[name] = by_side[name].joined(sample) if name in by_side else sample


def probe(model: str, precision: str) -> tuple[list[int], int]:
    """Tokens that are a word with a space before it (of a model of bytes: letters), and the bytes of an entry."""
    with policed(model, ROOT, precision):
        texts = list(enumerate(sym.vocabulary()))
        words = [token for token, text in texts if re.fullmatch(rb" [a-z]{2,}", text)]
        letters = [token for token, text in texts if re.fullmatch(rb"[a-z]", text)]
        return words or letters, sym.model_info().entry_bytes


def pairs(words: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def save(path: Path, samples: Samples, heading: str, facts: dict[str, Any]) -> None:
    """With what an earlier run on this machine found of other cases and sides."""
    place = path.with_name(f"{path.name}.json")
    before = json.loads(place.read_text()) if place.exists() else {}
    if before.get("processor") == facts["processor"]:
        old: Samples = {
            case: {side: Sample(**fields) for side, fields in by_side.items()}
            for case, by_side in before["samples"].items()
        }
        samples = {case: old.get(case, {}) | samples.get(case, {}) for case in old | samples}
        facts = facts | {"servers": before["servers"] | facts["servers"]}
    plain = {case: {side: dataclasses.asdict(each) for side, each in found.items()} for case, found in samples.items()}
    place.write_text(json.dumps(facts | {"samples": plain}, indent=1) + "\n")
    path.with_name(f"{path.name}.txt").write_text(f"{heading}\n\n{table(samples)}")
    path.with_name(f"{path.name}.svg").write_text(curves.of_rag(samples, heading))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--index", type=lambda text: list(map(float, text.split(","))), default=[3.0, 1.5, 1.0, 0.5])
    parser.add_argument("--policies", type=lambda text: text.split(","), default=["lru", "ttl", "idle", "cost"])
    parser.add_argument("--rag-sides", type=lambda text: text.split(","), help="of RAG: none,own,pinned, and policies")
    parser.add_argument("--kv-tokens", type=int, default=11_648, help="that memory has room for: 256 MiB of smollm2")
    parser.add_argument("--scale", type=float, default=1.0, help="of how many sequences there are")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one round at an eighth of the size, with short pauses")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--group", action="append", default=[], metavar="NAME=PGID", help="its process group")
    parser.add_argument("--slots", action="append", default=[], metavar="NAME=DIR", help="where llama.cpp saves slots")
    parser.add_argument("--quiet", type=float, default=0.1, help="share of the cores that others may take")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that a turn waits for a quiet machine")
    parser.add_argument("--seed", default=str(int(time.time())), help="of the prompts")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json, .txt and .svg")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.server, args.group, args.slots = pairs(args.server), pairs(args.group), pairs(args.slots)
    args.rag_sides = args.rag_sides or ["none", "own", "pinned", *args.policies]
    if args.quick:
        args.scale, args.rounds, args.index = QUICK_SCALE, 1, args.index[-1:]
    heading = f"{processor()}; {args.model} {args.precision}; scale {args.scale:g}; {time.strftime('%Y-%m-%d')}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # daemons and clients end with it
    with contextlib.ExitStack() as stack:
        tokens, entry_bytes = probe(args.model, args.precision)
        servers = []
        for name, url in args.server.items():
            group = int(args.group[name]) if name in args.group else None
            servers.append(stack.enter_context(served_side(name, url, group, "")))
        facts = {"processor": processor(), "model": args.model, "precision": args.precision}
        facts["servers"] = {server.name: server.about for server in servers}

        def keep(samples: Samples) -> None:
            if args.save:
                save(RESULTS / args.save, samples, heading, facts)

        machine = Machine(args, tokens, entry_bytes, servers, {}, keep)
        runs = {"rag": run_rag, "sessions": run_sessions, "crowd": run_crowd, "editor": run_editor}
        runs |= {"resumes": run_resumes, "restart": run_restart}
        for name in args.only:
            runs[name](machine)
        keep(machine.samples)
        found = machine.samples
    plain = {case: {side: dataclasses.asdict(each) for side, each in of.items()} for case, of in found.items()}
    print(json.dumps(facts | {"samples": plain}) if args.json else f"{heading}\n\n{table(found)}", end="")


if __name__ == "__main__":
    main()
