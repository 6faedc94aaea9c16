"""The arithmetic that every attention kernel does, so that a row has the same bits whichever of them attends for it.

A sequence is cut into splits of `SPLIT_PAGES` pages, counted from its own start and from nothing else. A split is
walked in steps of `STEP_PAGES` pages with the running maximum and sum of FlashAttention; what it leaves is a
normalised partial result and the log2 of its sum of weights; the partial results of a row are merged in order. Decode
spreads the splits over programs and merges in a kernel of its own; a shared prefix does the same for many rows
at once; prefill walks the splits one after the other and merges in registers. Three rules keep their bits equal:

- Every product and sum below is one instruction that is written out (`tl.fma`, `tl.dot` with its accumulator), and
  the kernels are compiled with `enable_fp_fusion=False`: no compiler fuses in one kernel what it leaves in another.
- A step that a row does not see changes nothing: its weights are exactly 0, and what was there before is
  multiplied by exactly 1. So a tile may walk steps that only some of its rows see.
- The matrix instruction is the same, and it does every sum along a row: that of the weights is a product with ones,
  as the order in which `tl.sum` adds is that of a layout, which Triton chooses for each kernel. Half-precision tiles
  have at least 64 rows, so that a Hopper GPU takes wgmma (64 rows) for one query as for a thousand; mma.sync
  for the few and wgmma for the many would be different instructions, of which nobody promises equal sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from libsym.abi import PAGE_ENTRIES

SPLIT_PAGES = 8
"""Pages in a split. 256 entries: a Llama-3-8B sequence of 4,096 gives 128 programs, one for each of 132
multiprocessors, while its partial results are under 2 % of the K and V read. Part of the numbers'
contract: another value gives other bits."""

STEP_PAGES = 2
"""Pages in a step of a split. Part of the contract, too. With one page the sums are rescaled twice as often (64
multiplications a thread at head_dim 128, beside 16 exponentials); four pages need 128 KB of shared memory for two
stages, and decode then has one program a multiprocessor."""

assert STEP_PAGES == 2, "load_frames loads two"

STEP_ENTRIES = STEP_PAGES * PAGE_ENTRIES
SPLIT_STEPS = SPLIT_PAGES // STEP_PAGES
TOTAL_LANES = 8
"""Columns of the ones that add up the weights: the fewest of a matrix instruction. The ones lie in shared memory, and
with 16 columns decode at head_dim 128 would not fit twice into a Hopper multiprocessor's 228 KB."""
SPLIT_ENTRIES = SPLIT_PAGES * PAGE_ENTRIES


@triton.jit
def load_frames(table_ptr: tl.tensor, step: tl.tensor, num_pages: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The frames of a step's two pages; 0 past the last page, where nothing is read.

    Called a step ahead, its results carried around the loop: Triton would make a load whose result is an address of
    the same iteration a pipeline stage of its own, and the wait for that stage is a wait for every page under way.
    """
    page = step * 2
    first = tl.load(table_ptr + page, mask=page < num_pages, other=0)
    second = tl.load(table_ptr + page + 1, mask=page + 1 < num_pages, other=0)
    return first, second


@triton.jit
def frame_offsets(
    first_frame: tl.tensor,
    second_frame: tl.tensor,
    page_stride: tl.tensor,
    slots: tl.tensor,  # [step entries]
    PAGE: tl.constexpr,
) -> tl.tensor:
    """Where each entry's frame begins, int64: an arena is larger than 2**31 elements."""
    # In this order: the other way round Triton loses sight of the stride's alignment and loads 2 bytes at a time.
    return tl.where(slots < PAGE, first_frame, second_frame).to(tl.int64) * page_stride


@triton.jit
def score_step(
    query: tl.tensor,  # [rows, lanes]
    key: tl.tensor,  # [step entries, lanes]
    seen: tl.tensor,  # [rows or 1, step entries]
    partly_seen: tl.tensor,  # whether some row does not see all of the step
    score_scale: tl.tensor,  # SOFTCAP: 2 log2(e) scale / cap
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """[rows, step entries]; times `log2_scale` they are the logarithms of the weights."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP:
        # tanh by one exponential: off by 1e-7 absolutely, for any argument.
        scores = 1.0 - 2.0 / (tl.exp2(scores * score_scale) + 1.0)
    if partly_seen:
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def sum_step(
    scores: tl.tensor,  # [rows, step entries]
    value: tl.tensor,  # [step entries, lanes]
    highest: tl.tensor,  # [rows] the largest log2 weight so far
    total: tl.tensor,  # [rows, TOTAL_LANES] the sum of weights, relative to `highest`, in every lane
    summed: tl.tensor,  # [rows, lanes] the weighted sum of values, relative to `highest`
    log2_scale: tl.tensor,  # log2(e) scale, or with a softcap log2(e) cap
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * log2_scale)
    # A row that has seen nothing yet: all its weights are exp2(-inf).
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(tl.fma(scores, log2_scale, -base[:, None]))
    shrink = tl.exp2(highest - base)
    weights = weights.to(value.dtype)
    ones = tl.full([value.shape[0], total.shape[1]], 1.0, value.dtype)
    total = tl.dot(weights, ones, acc=total * shrink[:, None], input_precision="ieee")
    summed = tl.dot(weights, value, acc=summed * shrink[:, None], input_precision="ieee")
    return new_highest, total, summed


@triton.jit
def finish_split(highest: tl.tensor, total: tl.tensor, summed: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A split's normalised partial result and log2 weight; zeros and -inf where a row saw nothing of it."""
    total = tl.max(total, axis=1)  # its lanes are equal
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    return summed * (1.0 / total)[:, None], tl.where(some, highest + tl.log2(total), float("-inf"))


@triton.jit
def merge_split(
    highest: tl.tensor,  # [rows]
    total: tl.tensor,  # [rows]
    summed: tl.tensor,  # [rows, lanes]
    partial: tl.tensor,  # [rows, lanes]
    log2_weight: tl.tensor,  # [rows]
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Joins the next split to those before it. One of weight -inf changes nothing."""
    new_highest = tl.maximum(highest, log2_weight)
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    shrink = tl.exp2(highest - base)
    weight = tl.exp2(log2_weight - base)
    total = tl.fma(total, shrink, weight)
    summed = tl.fma(summed, shrink[:, None], partial * weight[:, None])
    return new_highest, total, summed


@triton.jit
def finish_merge(total: tl.tensor, summed: tl.tensor) -> tl.tensor:
    """The result; zeros for a row that attends to nothing."""
    return summed * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
