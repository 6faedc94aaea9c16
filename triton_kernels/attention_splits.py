"""Arithmetic of all attention kernels. A row gets the same bits in every kernel.

A sequence is cut into splits of `SPLIT_PAGES` pages, always counted from its own start. A split is walked in steps of
`STEP_PAGES` pages with the running maximum and sum of FlashAttention. A split gives a normalised partial result and the
log2 of its sum of weights. The partial results of a row are merged in order. Decode spreads the splits over programs,
and a second kernel merges them. The kernel for shared prefixes does the same for many rows together. Prefill walks the
splits one after another and merges them in registers. Three rules keep the bits equal:

- Each product and sum below is one explicit instruction (`tl.fma`, `tl.dot` with its accumulator), and the kernels are
  compiled with `enable_fp_fusion=False`. So the compiler cannot fuse operations in one kernel and not in another.
- A step that a row does not see changes nothing: its weights are exactly 0, and the running sums are multiplied by
  exactly 1. So a tile may walk steps that only some of its rows see.
- All kernels use the same matrix instruction, and it computes every sum along a row. The sum of the weights is a
  product with ones, because the order of `tl.sum` depends on the layout, which Triton chooses for each kernel.
  Half-precision tiles have at least 64 rows, so a Hopper GPU uses wgmma (64 rows) for one query and for a thousand.
  With mma.sync for few queries and wgmma for many, equal sums would not be guaranteed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from libsym.abi import PAGE_ENTRIES

SPLIT_PAGES = 8
"""Number of pages in a split. A split has 256 entries. A Llama-3-8B sequence of 4,096 entries then has 128 programs for
132 multiprocessors, and its partial results have under 2 % of the bytes of its K and V. Another value would change the
bits of results.
"""

STEP_PAGES = 2
"""Number of pages in a step of a split. Another value would change the bits, too. With one page the sums are rescaled
twice as often (64 multiplications a thread at head_dim 128, beside 16 exponentials). Four pages need 128 KB of shared
memory for two stages, which leaves one decode program per multiprocessor.
"""

assert STEP_PAGES == 2, "load_frames loads two pages"

STEP_ENTRIES = STEP_PAGES * PAGE_ENTRIES
SPLIT_STEPS = SPLIT_PAGES // STEP_PAGES
TOTAL_LANES = 8
"""Columns of the matrix of ones that adds up the weights: the minimum of a matrix instruction. The ones lie in shared
memory. With 16 columns, two decode programs at head_dim 128 would not fit into a Hopper multiprocessor's 228 KB."""
SPLIT_ENTRIES = SPLIT_PAGES * PAGE_ENTRIES


@triton.jit
def load_frames(table_ptr: tl.tensor, step: tl.tensor, num_pages: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the frames of a step's two pages, or 0 past the last page, where no entry is read.

    Kernels call this function one step ahead, and carry the results around the loop. If a load's result were an address
    in the same iteration, Triton would give that load a pipeline stage. A wait for this stage would be a wait for all
    pages in flight.
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
    """Return the offset of each entry's frame as int64, since an arena may exceed 2**31 elements."""
    # `where` comes before the product. In the other order, Triton does not know the alignment, and loads 2 bytes at a
    # time.
    return tl.where(slots < PAGE, first_frame, second_frame).to(tl.int64) * page_stride


@triton.jit
def score_step(
    query: tl.tensor,  # [rows, lanes]
    key: tl.tensor,  # [step entries, lanes]
    seen: tl.tensor,  # [rows or 1, step entries]
    partly_seen: tl.tensor,  # whether a row exists that does not see the whole step
    score_scale: tl.tensor,  # with SOFTCAP: 2 log2(e) scale / cap
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Return scores `[rows, step entries]`. A score times `log2_scale` is the log2 of a weight."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP:
        # This tanh takes one exponential. The absolute error is 1e-7 for any argument.
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
    # If a row has seen no entry yet, all its weights are exp2(-inf).
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
    """Return a split's normalised partial result and log2 weight. A row that saw no entry gets zeros and -inf."""
    total = tl.max(total, axis=1)  # all lanes of the sum are equal
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
    """Merge the next split into the earlier splits. A log2 weight of -inf changes nothing."""
    new_highest = tl.maximum(highest, log2_weight)
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    shrink = tl.exp2(highest - base)
    weight = tl.exp2(log2_weight - base)
    total = tl.fma(total, shrink, weight)
    summed = tl.fma(summed, shrink[:, None], partial * weight[:, None])
    return new_highest, total, summed


@triton.jit
def finish_merge(total: tl.tensor, summed: tl.tensor) -> tl.tensor:
    """Return the result of attention: zeros for a row that attends to no entry."""
    return summed * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
