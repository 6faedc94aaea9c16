"""The first kernel of a draw, by blocks of a row: applies caps, masks and penalties, and summarises each block.

A summary has the maximum and mass of the block. For top_k, a summary also has the largest of every 32 entries. For
top_p, a summary has the mass of each step below the maximum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_kernels.logits_rows import BLOCK, GROUPS, STEPS, RowSettings, Scratch, TokenLists, num_blocks
from triton_kernels.logits_weights import depth_of, exponentials, inverse, is_greedy


@triton.jit
def _capped(values: tl.tensor, cap: tl.tensor) -> tl.tensor:
    small = tl.exp(-2.0 * tl.abs(values) / cap)
    capped = cap * (1.0 - small) / (1.0 + small)
    return tl.where(values < 0.0, -capped, capped)


@triton.jit
def _change_listed(
    row_ptr: tl.tensor,  # [vocab_size]
    token_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    count_ptr: tl.tensor,
    first: tl.tensor,  # index of the row's first token in the lists
    end: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    start: tl.tensor,  # first token of the block; tokens of other blocks do not change
    BLOCK: tl.constexpr,
    LIST_LANES: tl.constexpr,
) -> None:
    for at in range(first, end, LIST_LANES):
        places = at + tl.arange(0, LIST_LANES)
        token = tl.load(token_ptr + places, mask=places < end, other=-1)
        listed = (token >= start) & (token < start + BLOCK)
        bias = tl.load(bias_ptr + places, mask=listed, other=0.0)
        count = tl.load(count_ptr + places, mask=listed, other=0)
        value = tl.load(row_ptr + token, mask=listed, other=0.0) + bias
        penalized = tl.where(value < 0.0, value * repetition, value / repetition)
        value = tl.where(count >= 0, penalized, value)
        value = tl.where(count > 0, value - frequency * count.to(tl.float32) - presence, value)
        tl.store(row_ptr + token, value, mask=listed)


@triton.jit(do_not_specialize_on_alignment=["first_ptr"])
def _scan_kernel(
    logits_ptr: tl.tensor,  # [rows, vocab_size] float32; capped in place
    changed_ptr: tl.tensor,  # [rows, vocab_size] float32, contiguous, written when MASK or LISTS
    allowed_ptr: tl.tensor,  # [rows, words] int32, read when MASK
    first_ptr: tl.tensor,  # [rows + 1] int32, read when LISTS, like the next three
    token_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    count_ptr: tl.tensor,
    temperature_ptr: tl.tensor,  # [rows], like the next five
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    group_ptr: tl.tensor,  # [rows, blocks * GROUPS], written if top_k is on
    step_mass_ptr: tl.tensor,  # [rows, blocks * STEPS], written if top_p is on and top_k is off
    block_maximum_ptr: tl.tensor,  # [rows, blocks], like the next four
    block_mass_ptr: tl.tensor,
    block_index_ptr: tl.tensor,
    raw_maximum_ptr: tl.tensor,
    raw_mass_ptr: tl.tensor,
    candidate_count_ptr: tl.tensor,  # [rows] int32, set to 0
    cap: tl.tensor,
    logits_row_stride: tl.tensor,
    allowed_row_stride: tl.tensor,
    vocab_size: tl.tensor,
    CAP: tl.constexpr,
    MASK: tl.constexpr,
    LISTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    LIST_LANES: tl.constexpr,
) -> None:
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * tl.num_programs(1) + block
    start = block * BLOCK
    entries = start + tl.arange(0, BLOCK)
    inside = entries < vocab_size
    values = tl.load(logits_ptr + row * logits_row_stride + entries, mask=inside, other=float("-inf"))
    if CAP:
        values = _capped(values, cap)
        tl.store(logits_ptr + row * logits_row_stride + entries, values, mask=inside)
        values = tl.where(inside, values, float("-inf"))
    # NaN and +inf are errors. For them, the block's maximum becomes +inf.
    is_bad = tl.max(tl.where(values < float("inf"), 0, 1), axis=0) > 0
    values = tl.where(values < float("inf"), values, float("-inf"))
    maximum = tl.max(values, axis=0)
    mass = tl.sum(exponentials(values, tl.where(maximum > float("-inf"), maximum, 0.0), 1.0), axis=0)
    tl.store(raw_maximum_ptr + at, tl.where(is_bad, float("inf"), maximum))
    tl.store(raw_mass_ptr + at, mass)
    if MASK:
        words = tl.load(allowed_ptr + row * allowed_row_stride + entries // 32, mask=inside, other=0)
        values = tl.where((words >> (entries % 32)) & 1 != 0, values, float("-inf"))
    if MASK or LISTS:
        changed = changed_ptr + row * vocab_size
        tl.store(changed + entries, values, mask=inside)
    if LISTS:
        tl.debug_barrier()  # after this point, threads change values that other threads have stored
        _change_listed(
            changed,
            token_ptr,
            bias_ptr,
            count_ptr,
            tl.load(first_ptr + row),
            tl.load(first_ptr + row + 1),
            tl.load(repetition_ptr + row),
            tl.load(presence_ptr + row),
            tl.load(frequency_ptr + row),
            start,
            BLOCK,
            LIST_LANES,
        )
        tl.debug_barrier()
        values = tl.load(changed + entries, mask=inside, other=float("-inf"))
        is_bad = tl.max(tl.where(values < float("inf"), 0, 1), axis=0) > 0
        values = tl.where(values < float("inf"), values, float("-inf"))
    if MASK or LISTS:
        maximum = tl.max(values, axis=0)
    temperature = tl.load(temperature_ptr + row)
    factor = inverse(temperature)
    finite = tl.where(maximum > float("-inf"), maximum, 0.0)
    weights = exponentials(values, finite, factor)
    tl.store(block_maximum_ptr + at, tl.where(is_bad, float("inf"), maximum))
    tl.store(block_mass_ptr + at, tl.sum(weights, axis=0))
    tl.store(block_index_ptr + at, tl.min(tl.where(values == maximum, entries, vocab_size), axis=0))
    if block == 0:
        tl.store(candidate_count_ptr + row, 0)
    top_k = tl.load(top_k_ptr + row)
    if is_greedy(temperature, top_k):
        return
    if (top_k > 0) & (top_k < vocab_size):
        largest = tl.max(tl.reshape(values, [BLOCK // GROUPS, GROUPS]), axis=0)
        tl.store(group_ptr + at * GROUPS + tl.arange(0, GROUPS), largest)
    elif tl.load(top_p_ptr + row) < 1.0:
        depths = (finite - values) * factor
        for step in range(STEPS):
            is_there = (depths >= depth_of(step)) & (depths < depth_of(step + 1))
            tl.store(step_mass_ptr + at * STEPS + step, tl.sum(tl.where(is_there, weights, 0.0), axis=0))


def scan(
    logits: torch.Tensor,
    values: torch.Tensor,
    settings: RowSettings,
    scratch: Scratch,
    *,
    lists: TokenLists | None = None,
    allowed: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    """Cap `logits [rows, vocab_size]` in place. If there are masks or lists, write the changed logits to `values`."""
    rows, vocab_size = logits.shape
    unused = scratch.kinds
    _scan_kernel[(rows, num_blocks(vocab_size))](
        logits,
        values,
        unused if allowed is None else allowed,
        *((unused,) * 4 if lists is None else (lists.first, lists.tokens, lists.biases, lists.counts)),
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.repetition,
        settings.presence,
        settings.frequency,
        scratch.groups,
        scratch.step_masses,
        scratch.block_maxima,
        scratch.block_masses,
        scratch.block_indices,
        scratch.raw_maxima,
        scratch.raw_masses,
        scratch.counts,
        float(softcap),
        logits.stride(0),
        0 if allowed is None else allowed.stride(0),
        vocab_size,
        CAP=softcap > 0.0,
        MASK=allowed is not None,
        LISTS=lists is not None,
        BLOCK=BLOCK,
        GROUPS=GROUPS,
        STEPS=STEPS,
        LIST_LANES=256,
        enable_fp_fusion=True,
        num_warps=8,
    )
