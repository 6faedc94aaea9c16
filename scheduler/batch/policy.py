"""Policy of steps: `policy.c` with numpy's arrays, for replays of traces and for tests.

The run calls the same C function directly, with its own arrays of the same form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler._loop import ffi, lib
from scheduler.batch.views import dtype_of

__all__ = [
    "CANDIDATE",
    "NO_DEADLINE",
    "ROOT",
    "SHARE",
    "Policy",
    "StepLimits",
    "new_shares",
]

NO_DEADLINE = int(lib.SYM_NO_DEADLINE)
ROOT = 0
"""Number of the root of the tree of shares."""

CANDIDATE = dtype_of("sym_candidate")
SHARE = dtype_of("sym_share")

Candidates: TypeAlias = npt.NDArray[np.void]
"""Records of CANDIDATE, in order of arrival."""
Shares: TypeAlias = npt.NDArray[np.void]
"""Records of SHARE: the root, and the shares below it."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step."""

    max_tokens: int = 512
    """Maximum number of rows of prefills: enough to read the weights once for many rows."""
    max_calls: int = 256
    max_digested: int = 64
    """Maximum number of rows in a step from prefills that want an answer for every row. Also the maximum number of
    guesses of drafts. With a vocabulary of 49,152, memory for 64 rows takes 13 MB.
    """
    min_chunk: int = 4
    """Rows of prefills that a step may always have beside decodes, however long these rows take.

    In int8 (two cores, AVX-512), 4 rows that see 3,700 entries add 11 ms to a step of 15 ms, and 8 such rows add 19 ms.
    In 1.75 times the time of 8 decodes, a step computes these decodes and 5 such rows, so a larger chunk would gain
    little.
    """
    step_s: float = 0.02
    """Time limit of a step that holds both decodes and prefills: the delay that decodes are promised.

    On two cores (AVX-512, 135M parameters) 8 decodes alone take 9 ms in int8 and 13 ms in bf16, so this limit is about
    twice as much. From 16 rows on, a row of a prefill costs the same in every chunk size: short chunks waste nothing.
    """

    def __post_init__(self) -> None:
        assert 0 < self.min_chunk <= self.max_tokens
        assert self.min_chunk <= self.max_digested
        assert self.max_calls > 1
        assert self.step_s > 0

    def in_c(self) -> Any:
        """Return the limits as a `sym_limits`."""
        return ffi.new(
            "sym_limits *",
            {
                "max_calls": self.max_calls,
                "max_tokens": self.max_tokens,
                "min_chunk": self.min_chunk,
                "max_digested": self.max_digested,
                "step_ns": round(self.step_s * 1e9),
            },
        )


def new_shares(parents: list[int], weights: list[float] | None = None) -> Shares:
    """Make a tree of shares without service.

    `parents`: each share's parent; -1 for the first share, which is the root.
    """
    shares = np.zeros(len(parents), SHARE)
    shares["parent"] = parents
    shares["weight"] = 1 if weights is None else weights
    assert (shares["weight"] > 0).all()
    return shares


class Policy:
    """Planner of steps for one set of limits."""

    def __init__(self, limits: StepLimits, cost: Any) -> None:
        """Make a planner. `cost`: a `sym_cost`, which may change between plans: see `cost_model.py`."""
        self._limits, self._cost = limits.in_c(), cost
        self._sizes = (0, 0)
        self._scratch = self._new_scratch(0, 0)

    def plan(self, candidates: Candidates, shares: Shares, now_ns: int) -> npt.NDArray[np.int32]:
        """Return the number of entries of each candidate in the next step, and charge the service to `shares`."""
        assert candidates.dtype == CANDIDATE
        assert shares.dtype == SHARE
        n, num_shares = len(candidates), len(shares)
        if n > self._sizes[0] or num_shares > self._sizes[1]:
            self._scratch = self._new_scratch(2 * n, 2 * num_shares)
        num_now = np.empty(n, np.int32)
        lib.sym_policy_plan(
            ffi.from_buffer("sym_candidate[]", candidates),
            n,
            ffi.from_buffer("sym_share[]", shares, require_writable=True),
            num_shares,
            self._limits,
            self._cost,
            now_ns,
            ffi.from_buffer("int32_t[]", num_now, require_writable=True),
            self._scratch,
        )
        return num_now

    @property
    def num_compared(self) -> int:
        """Comparisons of all plans since the working memory grew last."""
        return int(lib.sym_scratch_num_compared(self._scratch))

    def _new_scratch(self, max_candidates: int, max_shares: int) -> Any:
        self._sizes = (max_candidates, max_shares)
        scratch = lib.sym_scratch_new(max_candidates, max_shares)
        if scratch == ffi.NULL:
            raise MemoryError
        return ffi.gc(scratch, lib.sym_scratch_free)
