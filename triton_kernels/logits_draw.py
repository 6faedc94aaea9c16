"""The last kernel of a draw, by rows: draws a token from candidates or, without top_k and top_p, from a piece of the
row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_kernels.logits_narrow import draw_narrowing
from triton_kernels.logits_rows import DONE, IN_ORDER, PIECE, ROOM, RowSettings, Scratch
from triton_kernels.logits_sort import draw_sorted
from triton_kernels.logits_weights import exponentials, inverse

ALL_BUT_NOTHING = 1.1754943508222875e-38
"""FLT_MIN: the least weight of a token that may be drawn."""


@triton.jit
def _draw_in_order(
    values_ptr: tl.tensor,  # [vocab_size]
    piece_mass_ptr: tl.tensor,  # [pieces]
    highest: tl.tensor,
    factor: tl.tensor,
    floor: tl.tensor,
    uniform: tl.tensor,
    vocab_size: tl.tensor,
    pieces: tl.tensor,
    PIECE_LANES: tl.constexpr,
    PIECE: tl.constexpr,
) -> tl.tensor:
    """Return the first token at which the running mass of allowed tokens exceeds `uniform` times their total."""
    lanes = tl.arange(0, PIECE_LANES)
    masses = tl.load(piece_mass_ptr + lanes, mask=lanes < pieces, other=0.0).to(tl.float64)
    ends = tl.cumsum(masses, axis=0)
    target = uniform * tl.sum(masses, axis=0)
    # If no piece exceeds the target because of rounding, take the last piece that has mass.
    last = tl.max(tl.where(masses > 0.0, lanes, 0), axis=0)
    piece = tl.minimum(tl.min(tl.where(ends > target, lanes, PIECE_LANES), axis=0), last)
    target -= tl.sum(tl.where(lanes < piece, masses, 0.0), axis=0)
    entries = piece * PIECE + tl.arange(0, PIECE)
    values = tl.load(values_ptr + entries, mask=entries < vocab_size, other=float("-inf"))
    weights = exponentials(values, highest, factor)
    weights = tl.where(weights < floor, 0.0, weights)
    ends = tl.cumsum(weights.to(tl.float64), axis=0)
    last = tl.max(tl.where(weights > 0.0, entries, 0), axis=0)
    return tl.minimum(tl.min(tl.where((ends > target) & (weights > 0.0), entries, vocab_size), axis=0), last)


@triton.jit
def _draw_kernel(
    logits_ptr: tl.tensor,  # [rows, vocab_size] float32
    values_ptr: tl.tensor,  # `logits_ptr`, or the changed logits
    temperature_ptr: tl.tensor,  # [rows], like the next four
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    kind_ptr: tl.tensor,  # [rows] int32
    number_ptr: tl.tensor,  # [rows, 3]
    total_ptr: tl.tensor,  # [rows] float64
    candidate_count_ptr: tl.tensor,  # [rows] int32
    candidate_ptr: tl.tensor,  # [rows, ROOM] int64
    piece_mass_ptr: tl.tensor,  # [rows, pieces]
    out_token_ptr: tl.tensor,  # [rows] int32
    out_logprob_ptr: tl.tensor,  # [rows] float32
    logits_row_stride: tl.tensor,
    values_row_stride: tl.tensor,
    vocab_size: tl.tensor,
    pieces: tl.tensor,
    PIECE_LANES: tl.constexpr,
    PIECE: tl.constexpr,
    ROOM: tl.constexpr,
    LOG2_ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
    FLT_MIN: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kind_ptr + row)
    if kind == DONE:
        return
    values = values_ptr + row * values_row_stride
    highest = tl.load(number_ptr + row * 3)
    factor = inverse(tl.load(temperature_ptr + row))
    floor = tl.load(min_p_ptr + row)
    uniform = tl.load(uniform_ptr + row)
    if kind == IN_ORDER:
        token = _draw_in_order(
            values,
            piece_mass_ptr + row * pieces,
            highest,
            factor,
            floor,
            uniform,
            vocab_size,
            pieces,
            PIECE_LANES,
            PIECE,
        )
    else:
        top_k = tl.load(top_k_ptr + row)
        top_k = tl.where(top_k < vocab_size, top_k, 0)
        top_p = tl.load(top_p_ptr + row)
        total = tl.load(total_ptr + row)
        lightest = tl.where(floor > 0.0, floor, FLT_MIN)
        count = tl.load(candidate_count_ptr + row)
        if count <= ROOM:
            candidates = candidate_ptr + row * ROOM
            token = draw_sorted(
                candidates, count, highest, factor, total, top_k, top_p, lightest, uniform, ROOM, LOG2_ROOM
            )
        else:
            token = draw_narrowing(values, vocab_size, highest, factor, total, top_k, top_p, lightest, uniform, CHUNK)
    tl.store(out_token_ptr + row, token)
    log_sum = tl.load(number_ptr + row * 3 + 2)
    tl.store(out_logprob_ptr + row, tl.load(logits_ptr + row * logits_row_stride + token) - log_sum)


def draw(
    logits: torch.Tensor,
    values: torch.Tensor,
    settings: RowSettings,
    scratch: Scratch,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
) -> None:
    """After the collection, draw the tokens of the rows that are not finished."""
    rows, vocab_size = logits.shape
    pieces = scratch.piece_masses.shape[1]
    _draw_kernel[(rows,)](
        logits,
        values,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.uniform,
        scratch.kinds,
        scratch.numbers,
        scratch.totals,
        scratch.counts,
        scratch.candidates,
        scratch.piece_masses,
        tokens,
        logprobs,
        logits.stride(0),
        values.stride(0),
        vocab_size,
        pieces,
        PIECE_LANES=int(triton.next_power_of_2(pieces)),
        PIECE=PIECE,
        ROOM=ROOM,
        LOG2_ROOM=ROOM.bit_length() - 1,
        CHUNK=2048,
        FLT_MIN=ALL_BUT_NOTHING,
        enable_fp_fusion=True,
        num_warps=8,
    )
