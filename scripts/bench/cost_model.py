#!/usr/bin/env python3
"""Measure how wrong the cost model's predictions are, by kind of step, while the model learns from steps of the CPU
decoder.

    .venv/bin/python scripts/bench/cost_model.py [--precision float32,bf16,int8] [--steps 600] [--quick]
        [--json]

Steps are random mixes: 1 to 256 decodes over 1 to 4,000 entries, with and without shared prefixes; prefill chunks of 16
to 512 tokens that begin at entry 0 to 4,000; and both. The model predicts eight steps, and then learns from the same
eight steps. The first third of the steps does not count.

Other processes on the cores make a step longer, which no model can predict. So a step counts only if other processes
used at most 6 % of the cores during it; `quiet` is the share of such steps. The model learns from all steps. With
--quick all steps count.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import arguments, busy_s, processor, row_view

from decoder.batch import Chunk, IntArray, StepBatch
from decoder.cores import available_cores
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model
from decoder.model_config import KV_DTYPE
from libsym.abi import PAGE_ENTRIES
from scheduler.batch.cost_model import KINDS, RECORD, CostModel, Records

ARENA_BYTES = 3 << 29
MAX_DECODES = 256
MAX_ENTRIES = 4000
TOGETHER = 8
"""Number of steps that are predicted before the model learns from them together."""
QUIET = 0.06


@dataclass(frozen=True, slots=True)
class Built:
    batch: StepBatch
    record: Records


class Mixes:
    """Random batches over one arena."""

    def __init__(self, model: Model, arena: Arena, seed: int) -> None:
        self._arena, self._vocab_size = arena, model.config.vocab_size
        self._rng = np.random.default_rng(seed)
        self._logits = np.zeros((MAX_DECODES + 1, self._vocab_size), np.float32)
        self._chunks: list[Chunk] = []
        self._free: list[int] = []
        values = self._rng.standard_normal(arena.pages[:16].shape).astype(np.float32)
        pages = values if arena.dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
        for page in range(arena.num_pages):
            arena.pages[page] = pages[page % len(pages)]

    def next(self) -> Built:
        self._chunks, self._free = [], list(self._rng.permutation(self._arena.num_pages))
        record = np.zeros(1, RECORD)
        kind = self._rng.choice(["decodes", "prefills", "mixed"], p=[0.6, 0.15, 0.25])
        if kind != "prefills":
            self._add_decodes(record)
        if kind != "decodes":
            self._add_prefills(record)
        record["num_rows"] = sum(len(chunk.tokens) for chunk in self._chunks)
        record["num_wanted"] = sum(len(chunk.rows) for chunk in self._chunks)
        return Built(StepBatch(tuple(self._chunks)), record)

    def _pages(self, num_entries: int) -> list[int] | None:
        """Return free pages for `num_entries` entries. None: fewer than 300 pages would be left for the rest of the
        step.
        """
        count = -(-num_entries // PAGE_ENTRIES)
        return None if len(self._free) < count + 300 else [self._free.pop() for _ in range(count)]

    def _add_decodes(self, record: Records) -> None:
        count = round(2 ** self._rng.uniform(0, 8))
        longest = int(2 ** self._rng.uniform(3, np.log2(MAX_ENTRIES)))
        groups = int(self._rng.choice([0, 1, 1 + count // 8]))
        prefixes = [self._pages(PAGE_ENTRIES * int(self._rng.integers(1, 2 + longest // 64))) for _ in range(groups)]
        used = set()
        for index in range(count):
            prefix = (prefixes[index % groups] or []) if groups else []
            own = int(self._rng.integers(1, longest + 1)) if not prefix else int(self._rng.integers(1, 200))
            pages = self._pages(own + 1)
            if pages is None:
                pages = [self._free.pop()]
                own = PAGE_ENTRIES - 1
            start = PAGE_ENTRIES * len(prefix) + own
            self._add(prefix + pages, start, 1, num_wanted=1)
            record["num_seen"] += start
            record["num_entries"] += own
            if prefix and prefix[0] not in used:
                used.add(prefix[0])
                record["num_entries"] += PAGE_ENTRIES * len(prefix)

    def _add_prefills(self, record: Records) -> None:
        for _ in range(int(self._rng.choice([1, 1, 2, 4]))):
            count = int(2 ** self._rng.uniform(4, 9))
            start = int(self._rng.choice([0, int(self._rng.integers(0, MAX_ENTRIES))]))
            pages = self._pages(start + count)
            if pages is None and self._chunks:
                return
            assert pages is not None
            self._add(pages, start, count, num_wanted=int(self._rng.random() < 0.3))
            record["num_pairs"] += count * start + count * (count + 1) // 2

    def _add(self, pages: list[int], start: int, count: int, num_wanted: int) -> None:
        tokens: IntArray = self._rng.integers(0, self._vocab_size, count).astype(np.int32)
        positions = np.arange(start, start + count, dtype=np.int32)
        row = min(len(self._chunks), MAX_DECODES)
        rows = (row_view(self._logits[row]),) * num_wanted
        self._chunks.append(Chunk(tokens, positions, np.array(pages, np.int32), start, rows))


def measure(precision: str, options: argparse.Namespace) -> dict[str, Any]:
    model = load_model(options.model)
    dtype = KV_DTYPE[precision]
    arena = Arena(model.config, ARENA_BYTES // (PAGE_ENTRIES * model.config.entry_bytes(dtype)), dtype)
    decoder = CpuDecoder(model.config, model.weights, arena, options.threads, precision=precision)
    mixes, costs = Mixes(model, arena, options.seed), CostModel(f"cpu {decoder.isa}", precision, None)
    off: dict[str, list[float]] = {kind: [] for kind in KINDS}
    waiting: list[Records] = []
    num_quiet = 0
    for number in range(options.steps):
        built = mixes.next()
        others = -busy_s() + time.process_time()
        began, phases_s = time.perf_counter(), sum(decoder.phase_seconds().values())
        decoder.step(built.batch)
        took_s = time.perf_counter() - began
        others += busy_s() - time.process_time()
        step_s = sum(decoder.phase_seconds().values()) - phases_s
        built.record["ns"] = round(step_s * 1e9)
        is_quiet = others <= QUIET * took_s * available_cores()
        num_quiet += is_quiet
        if number >= options.steps // 3 and (is_quiet or options.quick):
            error = abs(float(costs.predict(built.record)[0]) / (step_s * 1e9) - 1)
            off[kind_of(built.record)].append(error)
        waiting.append(built.record)
        if len(waiting) == TOGETHER:
            costs.observe(np.concatenate(waiting))
            waiting.clear()
    decoder.close()
    cost = costs.coefficients
    return {
        "isa": decoder.isa,
        "threads": options.threads,
        "quiet_steps": num_quiet / options.steps,
        "errors": {kind: [float(np.median(each)), len(each)] for kind, each in off.items() if each},
        "rows_ms": [round(ns / 1e6, 3) for ns in cost.rows_ns],
        "head_ms": cost.head_ns / 1e6,
        "wanted_us": cost.wanted_ns / 1e3,
        "entry_ns": cost.entry_ns,
        "seen_ns": cost.seen_ns,
        "pair_ns": cost.pair_ns,
    }


def kind_of(record: Records) -> str:
    if record["num_pairs"][0]:
        return "mixed" if record["num_seen"][0] else "prefills"
    return KINDS[int(np.searchsorted([1, 8, 64], record["num_rows"][0]))]


def main() -> None:
    sizes = {"steps": 600, "threads": available_cores(), "seed": 0}
    kinds = {"precision": "float32,bf16,int8", "model": "smollm2"}
    options = arguments(__doc__, **kinds, **sizes, quick=False, json=False).parse_args()
    if options.quick:
        options.model, options.precision, options.steps = "tiny:positions=8192", "bf16", 120
    print(f"{processor()}, {available_cores()} cores; median relative error of a prediction (number of steps)\n")
    print("| precision |", " | ".join(KINDS), "| quiet |")
    print("|---" * (len(KINDS) + 2) + "|")
    found = {}
    for precision in options.precision.split(","):
        found[precision] = each = measure(precision, options)
        row = [
            f"{each['errors'][kind][0]:.1%} ({each['errors'][kind][1]})" if kind in each["errors"] else "-"
            for kind in KINDS
        ]
        print(f"| {precision}, {each['isa']}, {each['threads']} threads |", " | ".join(row), end="")
        print(f" | {each['quiet_steps']:.0%} |", flush=True)
    if options.json:
        print(json.dumps({"processor": processor(), "precisions": found}, indent=1))


if __name__ == "__main__":
    main()
