#!/usr/bin/env python3
"""Writes the traces in this directory from published quantiles and a seed. The same seed gives the same bytes.

    .venv/bin/python scripts/traces/make.py [--only rag] [--index 1.0] [--seed 18] [--out scripts/traces]
    .venv/bin/symphony policy replay scripts/traces/agents.trace --plot agents.svg

Published facts (TraceLab, 357,000 steps of coding agents): the tools of two products answer in 0.13 and 0.63 s
(medians). A person's pause is 86 s (median), 21 minutes (p90), 14 hours (p99). A step appends some 870 tokens and
generates 184 to 252; 96 % of a step's prompt existed before the step. The distributions around these figures, and all
else, are assumptions, which are named below.

rag     48 clients ask a corpus of 400 documents on disk. A document's popularity is drawn from a Pareto distribution.
        With a small --index, nearly every client wants the same few documents. With a large --index, all documents are
        equally popular.
agents  96 coding agents on one system prompt of 8,000 tokens. A person's request is some dozen steps with tools.
chat    500 people on one system prompt, who pause between their messages.
mixed   a third of each.

The times in a trace assume that each turn runs alone on a fast machine. A replay uses only the pauses between turns.
Turns that would begin after an hour are left out.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from scheduler.trace.file import TraceWriter
from scheduler.trace.records import ANSWER, ARRIVAL, FILE, NO_DEADLINE, Block, BlockKind, CallKind

KINDS = ("rag", "agents", "chat", "mixed")
HORIZON_S = 3600.0
PREFILL_S, DRAW_S = 1e-4, 0.02  # seconds for a token in the trace's times
MS = 1_000_000

PAUSE_S = ((0.02, 5.0), (0.5, 86.0), (0.9, 1260.0), (0.99, 50_400.0))
"""Quantiles of a person's pause. The smallest is an assumption."""
TOOLS_S = (0.13, 0.63)
"""Median time of a tool in each of two products. Each product has half of the agents."""
TOOL_SPREAD = 1.5
"""Standard deviation of the logarithm of a tool's time. A tenth of the calls take at least 7 times the median, and a
hundredth at least 33 times. This spread is an assumption.
"""


@dataclass(frozen=True, slots=True)
class Call:
    began_s: float
    ended_s: float
    file: int
    before: int
    appended: int
    generated: int
    pid: int


class Maker:
    """Random draws from one seed. They use only `random()`, which is the same in each version of Python."""

    def __init__(self, seed: int, index: float) -> None:
        self._random = random.Random(seed)
        self._index = index
        self.calls: list[Call] = []
        self.files: list[tuple[int, int, int, int]] = []
        self._num_files = self._num_programs = 0

    # Draws

    def _normal(self) -> float:
        return NormalDist().inv_cdf(min(max(self._random.random(), 1e-9), 1 - 1e-9))

    def spread(self, mean: float, spread: float) -> int:
        """Draw a whole number from a lognormal distribution. The least result is 1, the largest 12 times the mean."""
        value = mean * math.exp(spread * self._normal() - spread * spread / 2)
        return max(1, min(round(value), round(12 * mean)))

    def pause_s(self) -> float:
        """Draw a pause. Between two quantiles, the logarithm of the pause is linear in a standard normal value."""
        at = self._normal()
        places = [NormalDist().inv_cdf(share) for share, _ in PAUSE_S]
        logs = [math.log(seconds) for _, seconds in PAUSE_S]
        number = max(1, min(len(places) - 1, sum(place < at for place in places)))
        slope = (logs[number] - logs[number - 1]) / (places[number] - places[number - 1])
        return math.exp(max(logs[0], logs[number - 1] + slope * (at - places[number - 1])))

    def tool_s(self, median_s: float) -> float:
        return median_s * math.exp(TOOL_SPREAD * self._normal())

    # Programs

    def file(self, source: int = 0, num_shared: int = 0, *, is_named: bool = False) -> int:
        self._num_files += 1
        self.files.append((self._num_files, source, num_shared, int(is_named)))
        return self._num_files

    def _program(self, begins_within_s: float) -> tuple[int, float]:
        self._num_programs += 1
        return self._num_programs, self._random.random() * begins_within_s

    def _turn(self, pid: int, now_s: float, file: int, before: int, appended: int, generated: int) -> tuple[float, int]:
        """Add a call. Return the time of its end, and the file's length then."""
        ended_s = now_s + appended * PREFILL_S + generated * DRAW_S
        self.calls.append(Call(now_s, ended_s, file, before, appended, generated, pid))
        return ended_s, before + appended + generated

    def rag(self, num_clients: int, num_documents: int, num_queries: int) -> None:
        documents = [(self.file(is_named=True), self.spread(4000, 0.5)) for _ in range(num_documents)]
        popular = [(1 - self._random.random()) ** (-1 / self._index) for _ in documents]
        total, edges = 0.0, []
        for each in popular:
            total += each
            edges.append(total)
        for _ in range(num_clients):
            pid, now_s = self._program(20)
            for _ in range(num_queries):
                at = self._random.random() * total
                source, length = documents[sum(edge <= at for edge in edges)]
                fork = self.file(source, length)
                now_s, _ = self._turn(pid, now_s, fork, length, self.spread(60, 0.5), self.spread(100, 0.6))
                now_s += -2.0 * math.log(1 - self._random.random())

    def agents(self, num_agents: int) -> None:
        prompt, shared = self.file(is_named=True), 8000
        for number in range(num_agents):
            pid, now_s = self._program(300)
            median_s, file, length = TOOLS_S[number % 2], self.file(prompt, shared), shared
            while now_s < HORIZON_S:
                for _ in range(self.spread(12, 0.8)):
                    if now_s >= HORIZON_S or length > 60_000:
                        break
                    now_s, length = self._turn(pid, now_s, file, length, self.spread(870, 1.0), self.spread(218, 0.8))
                    now_s += self.tool_s(median_s)
                if length > 60_000:  # the next request starts a new context, because a context has a limited length
                    file, length = self.file(prompt, shared), shared
                now_s += self.pause_s()

    def chat(self, num_people: int) -> None:
        prompt, shared = self.file(is_named=True), 500
        for _ in range(num_people):
            pid, now_s = self._program(1800)
            file, length = self.file(prompt, shared), shared
            while now_s < HORIZON_S:
                now_s, length = self._turn(pid, now_s, file, length, self.spread(200, 1.2), self.spread(250, 0.8))
                now_s += self.pause_s()

    def blocks(self) -> Iterator[Block]:
        calls = sorted(self.calls, key=lambda call: (call.began_s, call.pid))
        used = {call.file for call in calls}
        used |= {source for file, source, *_ in self.files if file in used}
        arrivals, answers = np.zeros(len(calls), ARRIVAL), np.zeros(len(calls), ANSWER)
        for number, call in enumerate(calls):
            begin_ns, end_ns = round(call.began_s * 1e3) * MS, round(call.ended_s * 1e3) * MS
            numbers = (call.file, call.before, call.appended, call.pid, 1000)
            arrivals[number] = (number + 1, begin_ns, NO_DEADLINE, *numbers, number, 1, CallKind.GENERATION, 0)
            answers[number] = (number + 1, end_ns, call.appended + call.generated, 0)
        accounts = np.full(len(calls), 1000, np.int64).view([("number", "<i8")])
        yield Block.of(BlockKind.FILES, np.array([file for file in self.files if file[0] in used], FILE))
        yield Block(BlockKind.ARRIVALS, arrivals, accounts)
        yield Block.of(BlockKind.ANSWERS, np.sort(answers, order="ns"))


def make(kind: str, seed: int, index: float) -> Maker:
    maker = Maker(seed, index)
    if kind in ("rag", "mixed"):
        maker.rag(*((48, 400, 50) if kind == "rag" else (16, 150, 150)))
    if kind in ("agents", "mixed"):
        maker.agents(96 if kind == "agents" else 32)
    if kind in ("chat", "mixed"):
        maker.chat(500 if kind == "chat" else 170)
    return maker


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", choices=KINDS, action="append")
    parser.add_argument("--index", type=float, default=1.0, help="index of rag's Pareto distribution (default: 1.0)")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    for kind in options.only or KINDS:
        header = {"model": f"made: {kind}", "seed": options.seed, "clock": {"monotonic_ns": 0, "realtime_ns": 0}}
        path = options.out / f"{kind}.trace"
        with path.open("wb") as file:
            writer = TraceWriter(file, header)
            maker = make(kind, options.seed, options.index)
            for block in maker.blocks():
                writer.add(block)
        print(f"{path}: {len(maker.calls):,} turns, {writer.num_bytes:,} bytes")


if __name__ == "__main__":
    main()
