"""What a row's draw is given, and what the kernels that draw leave each other: see logits.py."""

from __future__ import annotations

import errno
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Entries of a program that scans: 32 a thread, 8 loads of 16 bytes on their way. 32 of them in a row of 128k."""
GROUPS = 128
"""Of a block, whose largest are kept."""
STEPS = 24
"""Of a block's mass below its maximum: 16 of half a weight's e-th part, 8 of a whole one."""
PIECE = 1024
"""Entries whose mass is kept, for draws without ranks."""
ROOM = 1024
"""Candidates that are sorted."""

NOT_A_DISTRIBUTION = -errno.EDOM
NOTHING_POSSIBLE = -errno.ERANGE

DONE: tl.constexpr = tl.constexpr(0)
IN_ORDER: tl.constexpr = tl.constexpr(1)
BY_RANK: tl.constexpr = tl.constexpr(2)
"""How a row's token is drawn, if the choice has not been its end."""


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How each row's token is drawn, `[rows]` each, on the device; a row of zeros with penalty 1 is greedy."""

    temperature: torch.Tensor
    """float32; 0: the argmax."""
    top_k: torch.Tensor
    """int32; 0: off."""
    top_p: torch.Tensor
    """float32; 1: off."""
    min_p: torch.Tensor
    """float32; 0: off."""
    repetition: torch.Tensor
    """float32, above 0; 1: off."""
    presence: torch.Tensor
    """float32; 0: off."""
    frequency: torch.Tensor
    """float32; 0: off."""
    uniform: torch.Tensor
    """float64 in [0, 1): what chooses."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """What rows say of single tokens: row r's are those from `first[r]` up to `first[r + 1]`, each token once."""

    first: torch.Tensor
    """[rows + 1] int32"""
    tokens: torch.Tensor
    """int32"""
    biases: torch.Tensor
    """float32, added before the penalties"""
    counts: torch.Tensor
    """int32: how often it was generated; 0: it came before only; -1: never seen, it has a bias alone"""


@dataclass(frozen=True, slots=True)
class Scratch:
    """What the kernels leave each other; kept by a step that is captured."""

    changed: torch.Tensor | None
    """[rows, vocab_size]: rows with masks and penalties; None where there will be none"""
    groups: torch.Tensor
    step_masses: torch.Tensor
    block_maxima: torch.Tensor
    block_masses: torch.Tensor
    block_indices: torch.Tensor
    raw_maxima: torch.Tensor
    raw_masses: torch.Tensor
    piece_masses: torch.Tensor
    kinds: torch.Tensor
    numbers: torch.Tensor
    """[rows, 3]: maximum, least candidate, log of the sum of exponentials"""
    totals: torch.Tensor
    counts: torch.Tensor
    candidates: torch.Tensor


def scratch_for(rows: int, vocab_size: int, device: torch.device | str, *, changes: bool = True) -> Scratch:
    """Scratch for up to so many rows; `changes`: there may be masks or token lists."""
    blocks = num_blocks(vocab_size)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return Scratch(
        changed=floats(rows, vocab_size) if changes else None,
        groups=floats(rows, blocks * GROUPS),
        step_masses=floats(rows, blocks * STEPS),
        block_maxima=floats(rows, blocks),
        block_masses=floats(rows, blocks),
        block_indices=torch.empty((rows, blocks), dtype=torch.int32, device=device),
        raw_maxima=floats(rows, blocks),
        raw_masses=floats(rows, blocks),
        piece_masses=floats(rows, blocks * (BLOCK // PIECE)),
        kinds=torch.empty(rows, dtype=torch.int32, device=device),
        numbers=floats(rows, 3),
        totals=torch.empty(rows, dtype=torch.float64, device=device),
        counts=torch.empty(rows, dtype=torch.int32, device=device),
        candidates=torch.empty((rows, ROOM), dtype=torch.int64, device=device),
    )


def num_blocks(vocab_size: int) -> int:
    return int(triton.cdiv(vocab_size, BLOCK))
