"""The batch of one step, in host integers: the scheduler passes it to the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
MassArray: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive new entries of one KV file."""

    tokens: IntArray
    """[n] token ids, n >= 1."""
    positions: IntArray
    """[n] positions. They only rotate Q and K (RoPE); the order of entries alone decides which entries a row sees."""
    pages: IntArray
    """Page table; it covers every entry below `start + n`."""
    start: int
    """Entry index of tokens[0]. Row i attends to entries 0 .. start + i."""
    rows: tuple[memoryview[float], ...]
    """Buffers for the logits of the chunk's last rows, one float32 [vocab] each."""
    mask: BoolArray | None = None
    """[n, start + n]: row i sees entry j <= start + i only if mask[i, j]. Every row must see its own entry."""
    mass: MassArray | None = None
    """[layers, KV heads, start + n or more]: the step adds to this array, for each entry, the attention weights of
    the chunk's rows, summed over the query heads of a KV head."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The chunks that one step computes, and the pages that it copies first."""

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int, int], ...] = ()
    """Pages to copy, as (source, target, entries). At least the first `entries` entries of a page are copied.

    A file that shares its last page gets such a copy before it appends to that page.
    """

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A decoder's step for callers in C, which run without the interpreter.

    The addresses are valid while the decoder is open. The caller checks that every index of a batch is in range.
    """

    function: int
    """A `sym_step_function` (`steps.h`)."""
    decoder: int
    parallel: int = 0
    """A `sym_parallel_function` for this decoder; 0: the decoder lends no threads, and the caller uses its own."""
    take_failure: Callable[[], BaseException | None] = field(default=lambda: None, kw_only=True)
    """Function that returns the Python exception of the last step, if that step failed, and forgets the exception."""
