"""Comparison of several policies on a workload, as a table for people and as JSON for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvfs.tiers.loading import load
from kvfs.tiers.policy import Rank
from symphony.policy.machine import Machine
from symphony.policy.simulation import ReplayOutcome, Simulation
from symphony.policy.workload import Workload
from symphony.views.reports import human_bytes

NONE = "none"
"""Name of the policy without tiers, under which evicted KV is computed again."""
UNBOUNDED = "unbounded"
"""Name of the row for a memory that holds all pages: the bound that policies can approach."""


@dataclass(frozen=True, slots=True)
class Comparison:
    workload: Workload
    machine: Machine
    num_frames: int
    outcomes: Mapping[str, ReplayOutcome]
    """Outcomes by policy, UNBOUNDED first."""


def policies(names: Sequence[str]) -> dict[str, Rank | None]:
    """Load policies by name. For NONE, the value is None. Invalid: a name or a file is not a policy."""
    return {name: None if name == NONE else load(name) for name in names}


def compare(
    workload: Workload,
    machine: Machine,
    ranks: Mapping[str, Rank | None],
    memory_bytes: int | None,
    share: float | None,
) -> Comparison:
    """Replay a workload under each policy. Memory is `memory_bytes`, or a `share` of the workload's peak."""
    everything = sum(-(-segment.size // 32) + 1 for segment in workload.segments)
    unbounded = Simulation(workload, machine, everything, load("lru")).run()
    num_frames = int(unbounded.most_used * share) if share is not None else (memory_bytes or 0) // machine.page_bytes
    num_frames = max(1, num_frames)
    outcomes = {UNBOUNDED: unbounded}
    outcomes |= {name: Simulation(workload, machine, num_frames, rank).run() for name, rank in ranks.items()}
    return Comparison(workload, machine, num_frames, outcomes)


def numbers(outcome: ReplayOutcome, page_bytes: int) -> dict[str, Any]:
    """Return the numbers of an outcome, for scripts."""
    latency_s = outcome.latency_s
    middle, most = np.percentile(latency_s, (50, 99)).tolist()
    return {
        "seconds": outcome.seconds,
        "turns_per_s": len(latency_s) / outcome.seconds,
        "tokens_per_s": (outcome.num_appended + outcome.num_generated) / outcome.seconds,
        "latency_mean_s": float(latency_s.mean()),
        "latency_p50_s": middle,
        "latency_p99_s": most,
        "resumes": outcome.num_resumes,
        "hidden": outcome.num_hidden / outcome.num_resumes if outcome.num_resumes else None,
        "pages_read": outcome.num_in,
        "pages_written": outcome.num_out,
        "bytes_read": outcome.num_in * page_bytes,
        "bytes_written": outcome.num_out * page_bytes,
        "tokens_again": outcome.num_again,
        "decisions": outcome.num_decisions,
        "steps": outcome.num_steps,
        "most_bytes": outcome.most_used * page_bytes,
    }


def as_json(found: Comparison) -> dict[str, Any]:
    page_bytes = found.machine.page_bytes
    return {
        "machine": found.machine.name,
        "about": found.machine.about,
        "memory_bytes": found.num_frames * page_bytes,
        "page_bytes": page_bytes,
        "read_bytes_s": found.machine.read_bytes_s,
        "write_bytes_s": found.machine.write_bytes_s,
        "programs": len(found.workload.programs),
        "turns": found.workload.num_turns,
        "policies": {name: numbers(outcome, page_bytes) for name, outcome in found.outcomes.items()},
    }


_COLUMNS = ("policy", "turns/s", "tokens/s", "mean", "p50", "p99", "hidden", "read", "written", "again")


def table(found: Comparison) -> list[str]:
    """Return the lines of a comparison's table, for people. Latencies are in seconds."""
    told = as_json(found)
    unbounded = told["policies"][UNBOUNDED]
    memory, most = human_bytes(told["memory_bytes"]), human_bytes(unbounded["most_bytes"])
    read, write = human_bytes(told["read_bytes_s"]), human_bytes(told["write_bytes_s"])
    lines = [
        f"machine   {found.machine.about}",
        f"memory    {memory} of the {most} that all of it takes; a disk of {read}/s, writing {write}/s",
        f"workload  {told['programs']:,} programs, {told['turns']:,} turns, {unbounded['resumes']:,} resumes",
        "",
    ]
    rows = [_COLUMNS, *(_row(name, each) for name, each in told["policies"].items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (word.rjust(width) for word, width in zip(row, widths, strict=True))
        lines.append("  ".join((first.strip().ljust(widths[0]), *others)))
    return lines


def _row(name: str, each: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{each['turns_per_s']:.3g}",
        f"{each['tokens_per_s']:,.0f}",
        f"{each['latency_mean_s']:.3f}",
        f"{each['latency_p50_s']:.3f}",
        f"{each['latency_p99_s']:.3f}",
        "-" if each["hidden"] is None else f"{100 * each['hidden']:.1f} %",
        human_bytes(each["bytes_read"]),
        human_bytes(each["bytes_written"]),
        f"{each['tokens_again']:,}",
    )
