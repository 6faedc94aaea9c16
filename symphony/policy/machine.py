"""What a workload is replayed on: how long steps take, how large KV is, how fast the disk is.

Built in are two machines. "cpu" was measured: SmolLM2-135M in bf16 on two cores (scripts/bench/cost_model.py). "h100"
is modelled, and labelled so: no number of it was measured. A file of fitted costs (`costs.json` in a daemon's state
directory) gives the machine that the daemon ran on.
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
from scheduler.batch.policy import Limits

_SMOLLM2_ENTRY_BYTES = 23_040  # 30 layers, 3 heads of K and V of 64 in bf16


@dataclass(frozen=True, slots=True)
class Machine:
    """One that serves one model."""

    name: str
    about: str
    """For the head of a table."""
    cost: Any
    """A `sym_cost`."""
    entry_bytes: int
    read_bytes_s: float
    """Of the disk."""
    write_bytes_s: float
    latency_s: float
    """Of a read, before its first byte."""
    limits: Limits

    @property
    def page_bytes(self) -> int:
        return self.entry_bytes * PAGE_ENTRIES

    def bring_s(self, num_pages: FloatArray) -> FloatArray:
        """What bringing so many pages takes, each for itself."""
        seconds: FloatArray = self.latency_s + num_pages * (self.page_bytes / self.read_bytes_s)
        return seconds

    def compute_s(self, num_entries: FloatArray, before: FloatArray) -> FloatArray:
        """What computing so many entries takes, behind so many others."""
        chunk = self.limits.max_tokens
        rows_s = self.step_s(num_rows=chunk) / chunk
        pairs = num_entries * (before + num_entries / 2)
        seconds: FloatArray = num_entries * rows_s + pairs * (self.cost.pair_ns * 1e-9)
        return seconds

    def step_s(
        self, num_rows: int, num_wanted: int = 0, num_entries: int = 0, num_seen: int = 0, num_pairs: int = 0
    ) -> float:
        """What a step takes."""
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
    """scripts/bench/cost_model.py --precision bf16 --steps 240, two cores of an AMD EPYC with AVX-512, shared."""
    rows_ms = [5.56, 5.84, 6.37, 7.36, 9.36, 13.5, 22.4, 40.7, 78.1, 150.0, 294.0]
    cost = _cost(rows_ms, 1.12, 56.4, 606.0, 504.0, 220.0)
    about = "SmolLM2-135M in bf16 on two cores, as fitted"
    return Machine("cpu", about, cost, _SMOLLM2_ENTRY_BYTES, 1.5e9, 1.0e9, 1e-3, Limits())


def h100() -> Machine:
    """Modelled: 8 thousand million parameters in bf16 with 32 layers, 32 heads of 128 and 8 of K and V.

    A step reads 16 GB of weights at 2.5 TB/s (75 % of the memory's rate) and computes at 500 TFLOP/s (half the peak),
    whichever takes longer, and half a millisecond is lost. An entry of a decode is 128 KiB read at that rate, once for
    those that share it. A row of a prefill and an entry are 0.52 MFLOP.
    """
    weights_ms, row_ms, lost_ms = 16e9 / 2.5e12 * 1e3, 16e9 / 500e12 * 1e3, 0.5
    rows_ms = [lost_ms + max(weights_ms, row_ms * 2**knot) for knot in range(NUM_KNOTS)]
    entry_bytes = 2 * 32 * 8 * 128 * 2
    cost = _cost(rows_ms, 0.4, 2.0, entry_bytes / 2.5e12 * 1e9, 1.0, 0.524e6 / 500e12 * 1e9)
    about = "8B parameters in bf16 on an H100: MODELLED, not measured"
    limits = Limits(max_tokens=2048, max_calls=256, step_s=0.05)
    return Machine("h100", about, cost, entry_bytes, 6e9, 4e9, 1e-3, limits)


BUILT_IN = {"cpu": cpu, "h100": h100}


def machine_of(name_or_path: str, header: Mapping[str, Any]) -> Machine:
    """One that is built in, or that of a file. `header`: of the trace, which may say how large a page was."""
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
    limits = h100().limits if best.startswith("cuda") else Limits()
    return replace(cpu(), name=path.name, about=about, cost=costs.coefficients, entry_bytes=entry_bytes, limits=limits)


def _is_of(key: str, header: Mapping[str, Any]) -> bool:
    """Whether it was learnt from the model that the trace was recorded with."""
    return key.endswith(f" {header.get('precision')} {header.get('model')}")


def pages_of(num_entries: FloatArray) -> FloatArray:
    """That they lie in."""
    pages: FloatArray = np.ceil(num_entries / PAGE_ENTRIES)
    return pages
