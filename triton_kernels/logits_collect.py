"""The third kernel of a draw, by blocks of a row: collects the candidates.

For a row without top_k and top_p, the kernel stores the mass of each piece instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_kernels.logits_rows import BLOCK, BY_RANK, DONE, PIECE, ROOM, RowSettings, Scratch, num_blocks
from triton_kernels.logits_weights import exponentials, inverse, order_of


@triton.jit
def _collect_kernel(
    values_ptr: tl.tensor,  # [rows, vocab_size] float32: the logits, or the changed logits
    temperature_ptr: tl.tensor,  # [rows]
    min_p_ptr: tl.tensor,
    block_maximum_ptr: tl.tensor,  # [rows, blocks]
    kind_ptr: tl.tensor,  # [rows] int32
    number_ptr: tl.tensor,  # [rows, 3]
    candidate_count_ptr: tl.tensor,  # [rows] int32
    candidate_ptr: tl.tensor,  # [rows, ROOM] int64: keys, which sort by rank
    piece_mass_ptr: tl.tensor,  # [rows, blocks * (BLOCK // PIECE)]
    values_row_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = tl.load(kind_ptr + row)
    if kind == DONE:
        return
    entries = block * BLOCK + tl.arange(0, BLOCK)
    values_at = values_ptr + row * values_row_stride + entries
    if kind == BY_RANK:
        least = tl.load(number_ptr + row * 3 + 1)
        if tl.load(block_maximum_ptr + row * tl.num_programs(1) + block) >= least:
            values = tl.load(values_at, mask=entries < vocab_size, other=float("-inf"))
            is_candidate = (values >= least) & (values > float("-inf"))
            number = is_candidate.to(tl.int32)
            first = tl.atomic_add(candidate_count_ptr + row, tl.sum(number, axis=0))
            places = first + tl.cumsum(number, axis=0) - number
            keys = ((-1 - order_of(values)).to(tl.int64) << 32) | entries.to(tl.int64)
            tl.store(candidate_ptr + row * ROOM + places, keys, mask=is_candidate & (places < ROOM))
    else:
        values = tl.load(values_at, mask=entries < vocab_size, other=float("-inf"))
        factor = inverse(tl.load(temperature_ptr + row))
        weights = exponentials(values, tl.load(number_ptr + row * 3), factor)
        weights = tl.where(weights < tl.load(min_p_ptr + row), 0.0, weights)
        pieces = tl.arange(0, BLOCK // PIECE)
        masses = tl.sum(tl.reshape(weights, [BLOCK // PIECE, PIECE]), axis=1)
        tl.store(piece_mass_ptr + (row * tl.num_programs(1) + block) * (BLOCK // PIECE) + pieces, masses)


def collect(values: torch.Tensor, settings: RowSettings, scratch: Scratch) -> None:
    """After the choice, collect candidates from `values [rows, vocab_size]`: the logits, or the changed logits."""
    rows, vocab_size = values.shape
    _collect_kernel[(rows, num_blocks(vocab_size))](
        values,
        settings.temperature,
        settings.min_p,
        scratch.block_maxima,
        scratch.kinds,
        scratch.numbers,
        scratch.counts,
        scratch.candidates,
        scratch.piece_masses,
        values.stride(0),
        vocab_size,
        BLOCK=BLOCK,
        PIECE=PIECE,
        ROOM=ROOM,
        enable_fp_fusion=True,
        num_warps=8,
    )
