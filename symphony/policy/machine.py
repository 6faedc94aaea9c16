"""The machine of a replay: the times of its steps, the size of its KV, the speed of its disk.

Two machines are built in. "cpu" was measured: SmolLM2-135M in bf16 on two cores (scripts/bench/cost_model.py). "h100"
is modelled, and says so: none of its numbers was measured. A file of fitted costs (`costs.json` in a daemon's state
directory) describes the machine of that daemon.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvfs.tiers.policy import FloatArray
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid
from scheduler._loop import ffi, lib
from scheduler.batch.cost_model import NUM_KNOTS, CostModel
from scheduler.batch.policy import StepLimits

_SMOLLM2_ENTRY_BYTES = 23_040  # 30 layers, 3 heads of K and V of 64 in bf16


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that serves one model."""

    name: str
    about: str
    """Description, for the head of the table."""
    cost: Any
    """Coefficients of the cost model: a C `sym_cost`."""
    entry_bytes: int
    read_bytes_s: float
    """Read rate of the disk, in bytes a second."""
    write_bytes_s: float
    latency_s: float
    """Time before the first byte of a transfer."""
    limits: StepLimits

    @property
    def page_bytes(self) -> int:
        return self.entry_bytes * PAGE_ENTRIES

    def bring_s(self, num_pages: FloatArray) -> FloatArray:
        """Return the time to read pages from disk, for each number of pages."""
        seconds: FloatArray = self.latency_s + num_pages * (self.page_bytes / self.read_bytes_s)
        return seconds

    def compute_s(self, num_entries: FloatArray, before: FloatArray) -> FloatArray:
        """Return the time to compute `num_entries` entries that follow `before` entries, for each element."""
        chunk = self.limits.max_tokens
        rows_s = self.step_s(num_rows=chunk) / chunk
        pairs = num_entries * (before + num_entries / 2)
        seconds: FloatArray = num_entries * rows_s + pairs * (self.cost.pair_ns * 1e-9)
        return seconds

    def step_s(
        self, num_rows: int, num_wanted: int = 0, num_entries: int = 0, num_seen: int = 0, num_pairs: int = 0
    ) -> float:
        """Return the time of a step."""
        work = ffi.new("sym_work *", (num_rows, num_wanted, num_entries, num_seen, num_pairs))
        return float(lib.sym_cost_of(self.cost, work)) * 1e-9


def _cost(
    rows_ms: list[float], head_ms: float, wanted_us: float, entry_ns: float, seen_ns: float, pair_ns: float
) -> Any:
    assert len(rows_ms) == NUM_KNOTS
    return ffi.new(
        "sym_cost *", ([ms * 1e6 for ms in rows_ms], head_ms * 1e6, wanted_us * 1e3, entry_ns, seen_ns, pair_ns)
    )


def cpu() -> Machine:
    """Return the measured machine: two shared cores of an AMD EPYC with AVX-512.

    The numbers are from scripts/bench/cost_model.py --precision bf16 --steps 240.
    """
    rows_ms = [5.56, 5.84, 6.37, 7.36, 9.36, 13.5, 22.4, 40.7, 78.1, 150.0, 294.0]
    cost = _cost(rows_ms, 1.12, 56.4, 606.0, 504.0, 220.0)
    about = "SmolLM2-135M in bf16 on two cores, as fitted"
    return Machine("cpu", about, cost, _SMOLLM2_ENTRY_BYTES, 1.5e9, 1.0e9, 1e-3, StepLimits())


def h100() -> Machine:
    """Return a modelled machine: an H100 with a model of 8 billion parameters in bf16.

    The model has 32 layers, 32 query heads of 128, and 8 heads of K and V. A step takes 0.5 ms plus the longer of
    two times: reading 16 GB of weights at 2.5 TB/s (75 % of the memory's rate), or computing at 500 TFLOP/s (half the
    peak). A decode reads 128 KiB for each entry at the memory's rate, once for all calls that share the entry. Each
    pair of a prefill's row and an entry takes 0.52 MFLOP.
    """
    weights_ms, row_ms, lost_ms = 16e9 / 2.5e12 * 1e3, 16e9 / 500e12 * 1e3, 0.5
    rows_ms = [lost_ms + max(weights_ms, row_ms * 2**knot) for knot in range(NUM_KNOTS)]
    entry_bytes = 2 * 32 * 8 * 128 * 2
    cost = _cost(rows_ms, 0.4, 2.0, entry_bytes / 2.5e12 * 1e9, 1.0, 0.524e6 / 500e12 * 1e9)
    about = "8B parameters in bf16 on an H100: MODELLED, not measured"
    limits = StepLimits(max_tokens=2048, max_calls=256, step_s=0.05)
    return Machine("h100", about, cost, entry_bytes, 6e9, 4e9, 1e-3, limits)


BUILT_IN = {"cpu": cpu, "h100": h100}


def machine_of(name_or_path: str, header: Mapping[str, Any]) -> Machine:
    """Return a built-in machine, or the machine that a file of costs describes.
    `header`: header of the trace, which may tell the size of a page.
    """
    if name_or_path in BUILT_IN:
        return BUILT_IN[name_or_path]()
    path = Path(name_or_path)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["models"]
        best = max(kept, key=lambda key: (_is_of(key, header), int(kept[key]["num_seen"])))
    except OSError as error:
        raise Invalid(
            f"{name_or_path} is neither {' nor '.join(BUILT_IN)} nor a file of costs: {error.strerror}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise Invalid(f"{name_or_path} holds no costs: give costs.json of a daemon's state directory") from None
    costs = CostModel(best, "", path)
    page_bytes = header.get("page_bytes")
    entry_bytes = page_bytes // PAGE_ENTRIES if isinstance(page_bytes, int) else _SMOLLM2_ENTRY_BYTES
    about = f"{best}, of {costs.num_seen:,} steps"
    limits = h100().limits if best.startswith("cuda") else StepLimits()
    return replace(cpu(), name=path.name, about=about, cost=costs.coefficients, entry_bytes=entry_bytes, limits=limits)


def _is_of(key: str, header: Mapping[str, Any]) -> bool:
    """Return whether costs were fitted to the model and precision of the trace."""
    return key.endswith(f" {header.get('precision')} {header.get('model')}")


def pages_of(num_entries: FloatArray) -> FloatArray:
    """Return the number of pages for each number of entries."""
    pages: FloatArray = np.ceil(num_entries / PAGE_ENTRIES)
    return pages
