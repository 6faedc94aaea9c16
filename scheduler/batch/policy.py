"""Calls of the next step: the face of `policy.c` over numpy's arrays, for replay and tests.

The run calls the C function itself, with the same arrays.
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
    "Limits",
    "Policy",
    "new_shares",
]

NO_DEADLINE = int(lib.SYM_NO_DEADLINE)
ROOT = 0
"""The share that all others are in."""

CANDIDATE = dtype_of("sym_candidate")
SHARE = dtype_of("sym_share")

Candidates: TypeAlias = npt.NDArray[np.void]
"""Of CANDIDATE, in order of arrival."""
Shares: TypeAlias = npt.NDArray[np.void]
"""Of SHARE: the root, and what is below it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step."""

    max_tokens: int = 512
    """Rows of prefills: large enough that weights are read once for many of them."""
    max_calls: int = 256
    max_digested: int = 64
    """Rows of calls that want one for each entry, and guesses of drafts: 13 MB each for a vocabulary of 49,152."""
    min_chunk: int = 4
    """Rows of prefills beside decodes, however long they take: 4 that see 3,700 entries add 11 ms to 15 in int8 (two
    cores, AVX-512), 8 of them 19. In 1.75 times their time 8 decodes leave 5 of these: a larger chunk would buy little.
    """
    step_s: float = 0.02
    """Time that a step with decodes may take for the sake of prefills: the delay that decodes are promised.

    On two cores (AVX-512, 135M parameters) 8 decodes alone take 9 ms in int8 and 13 in bf16, so this is about twice as
    much. From 16 rows on a row of a prefill costs the same in a chunk of any size: short chunks waste nothing.
    """

    def __post_init__(self) -> None:
        assert 0 < self.min_chunk <= self.max_tokens
        assert self.min_chunk <= self.max_digested
        assert self.max_calls > 1
        assert self.step_s > 0

    def in_c(self) -> Any:
        """A `sym_limits`."""
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
    """A tree of shares that have had no service; the first one's parent is -1."""
    shares = np.zeros(len(parents), SHARE)
    shares["parent"] = parents
    shares["weight"] = 1 if weights is None else weights
    assert (shares["weight"] > 0).all()
    return shares


class Policy:
    """Plans steps for one set of limits; `cost` is a `sym_cost`, see `cost_model.py`, that may change meanwhile."""

    def __init__(self, limits: Limits, cost: Any) -> None:
        self._limits, self._cost = limits.in_c(), cost
        self._sizes = (0, 0)
        self._scratch = self._new_scratch(0, 0)

    def plan(self, candidates: Candidates, shares: Shares, now_ns: int) -> npt.NDArray[np.int32]:
        """Entries of each candidate in the next step; the service is counted in `shares`."""
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
        """Comparisons of the plans since an array was last larger than all before it."""
        return int(lib.sym_scratch_num_compared(self._scratch))

    def _new_scratch(self, max_candidates: int, max_shares: int) -> Any:
        self._sizes = (max_candidates, max_shares)
        scratch = lib.sym_scratch_new(max_candidates, max_shares)
        if scratch == ffi.NULL:
            raise MemoryError
        return ffi.gc(scratch, lib.sym_scratch_free)
