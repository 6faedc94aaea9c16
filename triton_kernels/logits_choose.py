"""The second kernel of a draw, by rows: finds the maximum and mass of a row, and chooses how to draw its token.

This kernel finishes greedy rows. A row that is drawn by rank gets a lower bound of its candidates. For top_k, the
maxima of at least top_k groups of 32 entries reach the bound. For top_p, the steps above the bound have at least the
fraction top_p of the total mass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_kernels.logits_rows import (
    BY_RANK,
    DONE,
    GROUPS,
    IN_ORDER,
    NOT_A_DISTRIBUTION,
    NOTHING_POSSIBLE,
    STEPS,
    RowSettings,
    Scratch,
    num_blocks,
)
from triton_kernels.logits_weights import depth_of, exponentials, inverse, is_greedy


@triton.jit
def _least_candidate(
    values: tl.tensor,
    measure: tl.tensor,  # count or mass of each value
    target: tl.tensor,
    highest: tl.tensor,
) -> tl.tensor:
    """Return a bound. The measures of values at or above the bound sum to `target` or slightly more. -inf: the measures
    of all values sum to less.
    """
    low = tl.min(tl.where(values > float("-inf"), values, highest), axis=0)
    if tl.sum(tl.where(values >= low, measure, 0.0), axis=0) < target:
        low = float("-inf")
    else:
        high = highest
        for _ in range(16):
            middle = low + 0.5 * (high - low)
            enough = tl.sum(tl.where(values >= middle, measure, 0.0), axis=0) >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    return low


@triton.jit
def _least_by_count(
    group_ptr: tl.tensor,  # [groups]
    num_groups: tl.tensor,
    top_k: tl.tensor,
    highest: tl.tensor,
    LANES: tl.constexpr,
) -> tl.tensor:
    """Return a value that the best `top_k` entries reach, because the maxima of at least `top_k` groups reach it."""
    lanes = tl.arange(0, LANES)
    groups = tl.load(group_ptr + lanes, mask=lanes < num_groups, other=float("-inf"))
    return _least_candidate(groups, tl.where(groups > float("-inf"), 1.0, 0.0), top_k.to(tl.float32), highest)


@triton.jit
def _least_by_mass(
    block_maximum_ptr: tl.tensor,  # [blocks]
    step_mass_ptr: tl.tensor,  # [blocks, STEPS]
    num_steps: tl.tensor,
    target: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
) -> tl.tensor:
    """Return a value such that entries at or above it hold at least `target` of the row's mass."""
    lanes = tl.arange(0, LANES)
    tops = tl.load(block_maximum_ptr + lanes // STEPS, mask=lanes < num_steps, other=float("-inf"))
    masses = tl.load(step_mass_ptr + lanes, mask=lanes < num_steps, other=0.0)
    ends = tops - depth_of(lanes % STEPS + 1) / factor
    # Raise the target by more than the rounding error of sums. Lower the value by more than the rounding error of
    # differences.
    least = _least_candidate(ends, masses * exponentials(tops, highest, factor), target * 1.00001, highest)
    return least - tl.abs(highest) * 1e-5


@triton.jit
def _choose_kernel(
    logits_ptr: tl.tensor,  # [rows, vocab_size] float32
    temperature_ptr: tl.tensor,  # [rows]
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    group_ptr: tl.tensor,  # [rows, blocks * GROUPS]
    step_mass_ptr: tl.tensor,  # [rows, blocks * STEPS]
    block_maximum_ptr: tl.tensor,  # [rows, blocks], like the next four
    block_mass_ptr: tl.tensor,
    block_index_ptr: tl.tensor,
    raw_maximum_ptr: tl.tensor,
    raw_mass_ptr: tl.tensor,
    kind_ptr: tl.tensor,  # [rows] int32
    number_ptr: tl.tensor,  # [rows, 3]
    total_ptr: tl.tensor,  # [rows] float64
    out_token_ptr: tl.tensor,  # [rows] int32
    out_logprob_ptr: tl.tensor,  # [rows] float32
    logits_row_stride: tl.tensor,
    vocab_size: tl.tensor,
    blocks: tl.tensor,
    BLOCK_LANES: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP_LANES: tl.constexpr,
    STEPS: tl.constexpr,
    EDOM: tl.constexpr,
    ERANGE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_LANES)
    inside = lanes < blocks
    at = row * blocks + lanes
    raw_maxima = tl.load(raw_maximum_ptr + at, mask=inside, other=float("-inf"))
    maxima = tl.load(block_maximum_ptr + at, mask=inside, other=float("-inf"))
    raw_highest, highest = tl.max(raw_maxima, axis=0), tl.max(maxima, axis=0)
    tl.store(out_logprob_ptr + row, float("-inf"))
    tl.store(kind_ptr + row, DONE)
    if (raw_highest == float("inf")) | (highest == float("inf")):
        tl.store(out_token_ptr + row, EDOM)
        return
    if highest == float("-inf"):
        tl.store(out_token_ptr + row, ERANGE)
        return
    raw_masses = tl.load(raw_mass_ptr + at, mask=inside, other=0.0)
    log_sum = raw_highest + tl.log(tl.sum(raw_masses * tl.exp(raw_maxima - raw_highest), axis=0))
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    if is_greedy(temperature, top_k):
        indices = tl.load(block_index_ptr + at, mask=inside, other=vocab_size)
        token = tl.min(tl.where(maxima == highest, indices, vocab_size), axis=0)
        tl.store(out_token_ptr + row, token)
        tl.store(out_logprob_ptr + row, tl.load(logits_ptr + row * logits_row_stride + token) - log_sum)
        return
    factor = inverse(temperature)
    masses = tl.load(block_mass_ptr + at, mask=inside, other=0.0)
    total = tl.sum((masses * exponentials(maxima, highest, factor)).to(tl.float64), axis=0)
    top_p = tl.load(top_p_ptr + row)
    floor = tl.load(min_p_ptr + row)
    is_cut = (top_k > 0) & (top_k < vocab_size)
    least = float("-inf")
    if is_cut | (top_p < 1.0):
        tl.store(kind_ptr + row, BY_RANK)
        if is_cut:
            largest = group_ptr + row * blocks * GROUPS
            least = _least_by_count(largest, blocks * GROUPS, top_k, highest, GROUP_LANES)
        else:
            tops = block_maximum_ptr + row * blocks
            steps = step_mass_ptr + row * blocks * STEPS
            least = _least_by_mass(tops, steps, blocks * STEPS, top_p * total, highest, factor, STEP_LANES, STEPS)
            if floor > 0.0:  # the bound of min_p, lowered by more than the rounding error of an exponential
                lowest = highest + (tl.log(floor) - 0.01) / factor - tl.abs(highest) * 1e-5
                least = tl.maximum(least, lowest)
    else:
        tl.store(kind_ptr + row, IN_ORDER)
    tl.store(number_ptr + row * 3, highest)
    tl.store(number_ptr + row * 3 + 1, least)
    tl.store(number_ptr + row * 3 + 2, log_sum)
    tl.store(total_ptr + row, total)


def choose(
    logits: torch.Tensor, settings: RowSettings, scratch: Scratch, tokens: torch.Tensor, logprobs: torch.Tensor
) -> None:
    """After the scan, choose the tokens of greedy rows, and the way to draw for other rows. Mark rows that allow no
    draw.
    """
    rows, vocab_size = logits.shape
    blocks = num_blocks(vocab_size)
    _choose_kernel[(rows,)](
        logits,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        scratch.groups,
        scratch.step_masses,
        scratch.block_maxima,
        scratch.block_masses,
        scratch.block_indices,
        scratch.raw_maxima,
        scratch.raw_masses,
        scratch.kinds,
        scratch.numbers,
        scratch.totals,
        tokens,
        logprobs,
        logits.stride(0),
        vocab_size,
        blocks,
        BLOCK_LANES=int(triton.next_power_of_2(blocks)),
        GROUP_LANES=int(triton.next_power_of_2(blocks * GROUPS)),
        GROUPS=GROUPS,
        STEP_LANES=int(triton.next_power_of_2(blocks * STEPS)),
        STEPS=STEPS,
        EDOM=NOT_A_DISTRIBUTION,
        ERANGE=NOTHING_POSSIBLE,
        enable_fp_fusion=True,
        num_warps=8,
    )
