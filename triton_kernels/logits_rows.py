"""Settings of each row's draw, and the scratch memory of the kernels that draw: see logits.py."""

from __future__ import annotations

import errno
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Number of entries of a block, which one program scans: 32 for each thread, with 8 loads of 16 bytes in flight. A row
of 128k entries has 32 blocks.
"""
GROUPS = 128
"""Number of groups in a block. The scan keeps the largest value of each group."""
STEPS = 24
"""Number of steps below a block's maximum for which the scan keeps the mass: 16 steps of half a temperature, then 8
steps of a whole temperature. Over a whole temperature, the weight falls by a factor of e.
"""
PIECE = 1024
"""Number of entries of a piece. A draw without top_k and top_p uses the mass of each piece."""
ROOM = 1024
"""Maximum number of candidates that are sorted."""

NOT_A_DISTRIBUTION = -errno.EDOM
NOTHING_POSSIBLE = -errno.ERANGE

DONE: tl.constexpr = tl.constexpr(0)
IN_ORDER: tl.constexpr = tl.constexpr(1)
BY_RANK: tl.constexpr = tl.constexpr(2)
"""Ways to draw a row's token. DONE: `choose` has finished the row."""


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Settings of each row's draw, on the device. Each tensor is `[rows]`. A row is greedy if all settings are 0 and
    `repetition` is 1.
    """

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
    """float64 in [0, 1): the random number of the draw."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Biases and counts of single tokens. Row r has items `first[r]` up to `first[r + 1]`, each token once."""

    first: torch.Tensor
    """[rows + 1] int32"""
    tokens: torch.Tensor
    """int32"""
    biases: torch.Tensor
    """float32, added before the penalties"""
    counts: torch.Tensor
    """int32: how often the token was generated; 0: only the prompt has the token; -1: the token has only a bias"""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Scratch memory that passes results from kernel to kernel. The graph of a captured step keeps this memory."""

    changed: torch.Tensor | None
    """[rows, vocab_size]: logits after masks and penalties; None: no row has a mask or a token list"""
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
    """Return scratch memory for up to `rows` rows. `changes`: rows may have masks or token lists."""
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
