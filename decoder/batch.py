"""The batch of one step, as host integers: the work that the scheduler hands the decoder."""

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
    """[n] RoPE positions; causality is entry order, positions only rotate."""
    pages: IntArray
    """Page table that covers every entry below `start + n`."""
    start: int
    """Entry index of tokens[0]: attention sees entries 0 .. start + i for row i."""
    rows: tuple[memoryview[float], ...]
    """Where logits go, one float32 [vocab] buffer each: of its last rows."""
    mask: BoolArray | None = None
    """[n, start + n]: of the entries up to its own, row i sees those with mask[i, j]; its own must be among them."""
    mass: MassArray | None = None
    """[layers, KV heads, start + n or more]: each entry's gets what the rows attend to it, over the query heads of a KV
    head."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The chunks that one step computes. Copies happen before anything is computed."""

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int, int], ...] = ()
    """(source, target, entries) of pages to copy, the first so many entries at least: copy-on-write of tails."""

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A decoder's step for callers in C, without the interpreter.

    Addresses, good as long as the decoder is open. Every index of the batch has to be in range.
    """

    function: int
    """A `sym_step_function` (`steps.h`)."""
    decoder: int
    parallel: int = 0
    """A `sym_parallel_function` for this decoder; 0: it has no threads to lend, and the caller brings its own."""
    take_failure: Callable[[], BaseException | None] = field(default=lambda: None, kw_only=True)
    """Returns Python's exception that the last step failed with, once."""
