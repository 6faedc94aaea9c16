#!/usr/bin/env python3
"""Measures what one decision of each policy of the tiers takes, beside the step that it has to fit into.

    .venv/bin/python scripts/bench/tier_policy.py [--programs 1000,10000] [--json FILE]

"rank" is the policy alone: arrays over files to the worth of each. "decision" is all that the daemon does: pages in
memory that may go, grouped by file, the policy, and the order in which they go. Each program has a file of 10 pages in
memory; a twentieth of them compute, so their pages are pinned. "guarded" is a policy in a thread of its own, as an
operator's file is. Steps are those of the modelled GPU and of the CPU (symphony/policy/machine.py): 256 decodes, each
over 4,000 entries.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from kvfs.tiers.candidates import candidates, in_order
from kvfs.tiers.loading import NAMES, Guarded
from kvfs.tiers.policy import Files, Gaps, Rank
from kvfs.tiers.residents import Residents
from libsym.abi import PAGE_ENTRIES
from symphony.policy.machine import Machine, cpu, h100

PAGES_EACH, ENTRIES_EACH, COMPUTES = 10, 4000, 0.05


class Store:
    """Frames of which nobody looks at the bytes."""

    page_bytes = 4096

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages

    def zero(self, page: int) -> None:
        """There is nothing to be zero."""


def files_of(count: int, rng: np.random.Generator) -> Files:
    is_known = rng.random(count) < 0.7
    return Files(
        num_pages=rng.integers(1, 600, count).astype(float),
        idle_s=rng.exponential(60, count),
        num_uses=rng.integers(1, 60, count).astype(float),
        gap_s=np.where(is_known, rng.exponential(20, count), np.nan),
        gap_spread_s=np.where(is_known, rng.exponential(5, count), np.nan),
        bring_s=rng.exponential(0.2, count),
        compute_s=rng.exponential(2, count),
        is_open=rng.random(count) < 0.8,
    )


def gaps_of(rng: np.random.Generator) -> Gaps:
    gaps = Gaps()
    for gap_s in (*rng.lognormal(np.log(0.3), 1.5, 3000), *rng.lognormal(np.log(86), 2, 1000)):
        gaps.add(float(gap_s))
    return gaps


def pool_of(count: int, rng: np.random.Generator) -> tuple[PagePool, Residents]:
    """Return a pool and its residents as the daemon has them, with so many files."""
    pool = PagePool(Store(count * PAGES_EACH))  # type: ignore[arg-type]
    residents = Residents(pool, lambda: 1e4)
    for number in range(count):
        residents.add(PageTable(pool, 0))
        residents.last_use_s[number] = 1e4 - rng.exponential(60)
    some = files_of(count, rng)
    residents.num_uses[:count], residents.gap_s[:count] = some.num_uses, some.gap_s
    residents.gap_spread_s[:count] = some.gap_spread_s
    residents.gaps = gaps_of(rng)
    pages = np.arange(pool.num_frames, dtype=np.int32)
    pool.store.bind(pages, pool.store.free.take(pool.num_frames))
    pool.fill[pages] = PAGE_ENTRIES
    pool.row_of[pages] = rng.permutation(np.repeat(np.arange(count), PAGES_EACH))
    pool.pins[pages[rng.random(len(pages)) < COMPUTES]] = 1
    return pool, residents


def median_ms(call: Callable[[], Any], rounds: int = 60) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def measure(name: str, rank: Rank, count: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    files, gaps = files_of(count, rng), gaps_of(rng)
    pool, residents = pool_of(count, rng)
    guarded = Guarded(rank, rank, 10.0)

    def decide() -> None:
        in_order(pool, residents, candidates(pool), rank, 1e4, 1e-3, lambda pages: pages * 1e-2, max_kept=0)

    found = {
        "policy": name,
        "programs": count,
        "rank_ms": median_ms(lambda: rank(files, gaps)),
        "guarded_ms": median_ms(lambda: guarded(files, gaps)),
        "decision_ms": median_ms(decide),
    }
    guarded.close()
    return found


def step_ms(machine: Machine, num_decodes: int) -> float:
    entries = num_decodes * ENTRIES_EACH
    return 1e3 * machine.step_s(num_decodes, num_decodes, entries, entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--programs", default="1000,10000")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    told = []
    print("| programs | policy | rank: ms | guarded: ms | decision: ms | of a step of 256 decodes: GPU | CPU |")
    print("|---|---|---|---|---|---|---|")
    for count in map(int, options.programs.split(",")):
        for name, rank in NAMES.items():
            each = measure(name, rank, count)
            steps = {machine.name: step_ms(machine, 256) for machine in (h100(), cpu())}
            each |= {f"step_{word}_ms": ms for word, ms in steps.items()}
            told.append(each)
            shares = " | ".join(f"{each['decision_ms'] / ms:.1%} of {ms:.0f} ms" for ms in steps.values())
            times = " | ".join(f"{each[key]:.2f}" for key in ("rank_ms", "guarded_ms", "decision_ms"))
            print(f"| {count:,} | {name} | {times} | {shares} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
