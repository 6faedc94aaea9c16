"""Attention of one new token per sequence over its paged KV: split along the sequence, then merged.

attention_splits.py has the splits and their arithmetic, and says why their boundaries are fixed. This kernel spreads
the splits of all rows over a grid that fills the GPU, for any lengths. A program takes every n-th (row, split, KV
head). So a batch with one long row and many short ones is as balanced as a batch of equal rows, and a page table that
is wider than its rows need costs nothing. (A program for each split of the table would be simpler. But with a table of
131,072 entries and lengths of 4,096, it would start 31 empty programs for each full one, and each would occupy shared
memory like a full one until it exits.)

The KV heads of a split follow each other in the work list, so that programs that run together read consecutive bytes of
one frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from libsym.abi import PAGE_ENTRIES
from triton_kernels.attention_launch import check_paged, list_lanes, narrow_shape, num_splits, numbers, output_for
from triton_kernels.attention_splits import (
    SPLIT_ENTRIES,
    finish_merge,
    finish_split,
    frame_offsets,
    load_frames,
    merge_split,
    score_step,
    sum_step,
)
from triton_kernels.shared_prefix_attention import SharedPrefixes, attend_shared_prefixes

MERGE_HEADS = 4
MERGE_AHEAD = 8
"""Number of partial results that the merge loads before it uses the first. So the merge waits for memory once for 8
results.
"""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for the partial results of splits. All layers of a step can share it. Its contents need not be kept."""

    partials: torch.Tensor
    """float32, at least batch * num_heads * splits * head_dim elements."""
    log2_weights: torch.Tensor
    """float32, at least batch * num_heads * splits elements."""

    @staticmethod
    def allocate(batch: int, num_heads: int, head_dim: int, table_pages: int, device: torch.device | str) -> Scratch:
        rows = batch * num_heads * num_splits(table_pages)
        return Scratch(
            torch.empty(rows * head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )


@triton.jit(do_not_specialize=["table_batch_stride", "batch", "num_splits"])
def _attend_splits_kernel(
    query_ptr: tl.tensor,  # [batch, num_heads, head_dim]
    key_ptr: tl.tensor,  # [num_pages, kv_heads, 32, head_dim]
    value_ptr: tl.tensor,  # as key_ptr, same strides
    page_table_ptr: tl.tensor,  # [batch, table_pages] int32
    length_ptr: tl.tensor,  # [batch] int32
    row_splits_ptr: tl.tensor,  # [batch] int32: splits that the shared-prefix kernel computes, read when SHARED
    partial_ptr: tl.tensor,  # [batch, num_heads, num_splits, head_dim] float32, contiguous
    log2_weight_ptr: tl.tensor,  # [batch, num_heads, num_splits] float32, contiguous
    score_scale: tl.tensor,
    log2_scale: tl.tensor,
    window: tl.tensor,  # entries that a row sees, including its own, when WINDOWED
    query_batch_stride: tl.tensor,
    query_head_stride: tl.tensor,
    page_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    entry_stride: tl.tensor,
    table_batch_stride: tl.tensor,
    batch: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    num_splits: tl.tensor,
    BATCH_LANES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT_STEPS: tl.constexpr,
    TOTAL_LANES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    SHARED: tl.constexpr,
) -> None:
    # The work list has the splits of row 0, then of row 1, and so on. Each split is listed once for every KV head.
    rows = tl.arange(0, BATCH_LANES)
    lengths = tl.load(length_ptr + rows, mask=rows < batch, other=0)
    firsts = tl.zeros_like(lengths)
    if WINDOWED:
        firsts = tl.maximum(lengths - window, 0) // (SPLIT_STEPS * STEP)
    if SHARED:
        firsts = tl.maximum(firsts, tl.load(row_splits_ptr + rows, mask=rows < batch, other=0))
    counts = tl.maximum(tl.cdiv(lengths, SPLIT_STEPS * STEP) - firsts, 0)
    ends = tl.cumsum(counts, axis=0)
    num_items = tl.sum(counts, axis=0) * num_kv_heads

    members = tl.arange(0, TILE_ROWS)
    lanes = tl.arange(0, HEAD_LANES)
    slots = tl.arange(0, STEP)
    query_inside = (members < GROUP)[:, None] & (lanes < HEAD_DIM)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % num_kv_heads
        unit = item // num_kv_heads
        row = tl.sum((ends <= unit).to(tl.int32), axis=0)
        split = unit + tl.sum(tl.where(rows == row, firsts + counts - ends, 0), axis=0)
        length = tl.load(length_ptr + row)
        lowest = 0
        if WINDOWED:
            lowest = tl.maximum(length - window, 0)
        num_pages = tl.cdiv(length, PAGE)
        first_step = tl.maximum(split * SPLIT_STEPS, lowest // STEP)
        last_step = tl.minimum((split + 1) * SPLIT_STEPS, tl.cdiv(length, STEP))

        heads = kv_head * GROUP + members
        query_offsets = row.to(tl.int64) * query_batch_stride + heads[:, None] * query_head_stride + lanes[None, :]
        query = tl.load(query_ptr + query_offsets, mask=query_inside, other=0.0)
        table_ptr = page_table_ptr + row.to(tl.int64) * table_batch_stride
        entry_offsets = kv_head * kv_head_stride + (slots % PAGE)[:, None] * entry_stride + lanes[None, :]
        highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS, TOTAL_LANES], tl.float32)
        summed = tl.zeros([TILE_ROWS, HEAD_LANES], tl.float32)
        first_frame, second_frame = load_frames(table_ptr, first_step, num_pages)
        for step in range(first_step, last_step):
            entries = step * STEP + slots
            # Slots past the length may hold old data, even NaN. They must not be read, because 0 * NaN is NaN.
            inside = (entries < length)[:, None] & (lanes < HEAD_DIM)[None, :]
            offsets = frame_offsets(first_frame, second_frame, page_stride, slots, PAGE)[:, None] + entry_offsets
            first_frame, second_frame = load_frames(table_ptr, step + 1, num_pages)
            key = tl.load(key_ptr + offsets, mask=inside, other=0.0).to(query.dtype)
            value = tl.load(value_ptr + offsets, mask=inside, other=0.0).to(query.dtype)
            seen = entries < length
            partly_seen = (step + 1) * STEP > length
            if WINDOWED:
                seen = seen & (entries >= lowest)
                partly_seen = partly_seen | (step * STEP < lowest)
            scores = score_step(query, key, seen[None, :], partly_seen, score_scale, SOFTCAP)
            highest, total, summed = sum_step(scores, value, highest, total, summed, log2_scale)
        partial, log2_weight = finish_split(highest, total, summed)
        partial_rows = (row.to(tl.int64) * num_heads + heads) * num_splits + split
        tl.store(partial_ptr + partial_rows[:, None] * HEAD_DIM + lanes[None, :], partial, mask=query_inside)
        tl.store(log2_weight_ptr + partial_rows, log2_weight, mask=members < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    partial_ptr: tl.tensor,  # [batch, num_heads, num_splits, head_dim] float32, contiguous
    log2_weight_ptr: tl.tensor,  # [batch, num_heads, num_splits] float32, contiguous
    length_ptr: tl.tensor,  # [batch] int32
    out_ptr: tl.tensor,  # [batch, num_heads, head_dim], contiguous
    window: tl.tensor,
    num_heads: tl.tensor,
    num_splits: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    SPLIT_ENTRIES: tl.constexpr,
    AHEAD: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, HEAD_LANES)
    length = tl.load(length_ptr + row)
    first_split = 0
    if WINDOWED:
        first_split = tl.maximum(length - window, 0) // SPLIT_ENTRIES
    last_split = tl.cdiv(length, SPLIT_ENTRIES)
    out_rows = row.to(tl.int64) * num_heads + heads
    last_splits = tl.where(heads < num_heads, last_split, 0)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    summed = tl.zeros([HEADS, HEAD_LANES], tl.float32)
    for first in range(first_split, last_split, AHEAD):
        for ahead in tl.static_range(AHEAD):
            used = first + ahead < last_splits
            inside = used[:, None] & (lanes < HEAD_DIM)[None, :]
            partial_rows = out_rows * num_splits + first + ahead
            log2_weight = tl.load(log2_weight_ptr + partial_rows, mask=used, other=float("-inf"))
            partial_ptrs = partial_ptr + partial_rows[:, None] * HEAD_DIM + lanes[None, :]
            partial = tl.load(partial_ptrs, mask=inside, other=0.0)
            highest, total, summed = merge_split(highest, total, summed, partial, log2_weight)
    merged = finish_merge(total, summed)
    out_offsets = out_rows[:, None] * HEAD_DIM + lanes[None, :]
    inside = (heads < num_heads)[:, None] & (lanes < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_offsets, merged.to(out_ptr.dtype.element_ty), mask=inside)


def paged_decode_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    groups: SharedPrefixes | None = None,
    scratch: Scratch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend `query [batch, num_heads, head_dim]` to each row's first `lengths[row]` entries.

    `key_pages` and `value_pages` are one layer's views of the arena, `[num_pages, kv_heads, 32, head_dim]` (see
    `layer_pages`), with the query's type or float8_e4m3fn. `page_tables` is `[batch, table_pages]` int32; row r uses
    its first `ceil(lengths[r] / 32)` pages. Nothing past a length is read. With a `window` a row sees only its last
    `window` entries. `groups` names rows that share their first pages. The pages of a group are read once for all of
    its rows, and the results have the same bits as without groups. A caller that reuses its buffers passes `scratch`
    and `out`. The host never waits for the device.
    """
    batch, num_heads, head_dim = query.shape
    num_kv_heads = key_pages.shape[1]
    check_paged(query, key_pages, value_pages, page_tables)
    assert page_tables.shape[0] == lengths.shape[0] == batch
    assert page_tables.dtype == lengths.dtype == torch.int32
    assert lengths.stride(0) == 1
    out = output_for(query, out)
    table_pages = page_tables.shape[1]
    scratch = scratch or Scratch.allocate(batch, num_heads, head_dim, table_pages, query.device)
    splits = num_splits(table_pages)
    assert scratch.log2_weights.numel() >= batch * num_heads * splits
    assert scratch.partials.numel() >= batch * num_heads * splits * head_dim

    shape = narrow_shape(num_heads, num_kv_heads, head_dim, query.dtype, key_pages.dtype)
    if groups is not None:
        attend_shared_prefixes(
            query,
            key_pages,
            value_pages,
            page_tables,
            lengths,
            groups,
            scratch.partials,
            scratch.log2_weights,
            scale=scale,
            softcap=softcap,
            window=window,
        )
    _attend_splits_kernel[(shape.num_programs(batch * num_kv_heads * splits, query.device),)](
        query,
        key_pages,
        value_pages,
        page_tables,
        lengths,
        lengths if groups is None else groups.row_splits,
        scratch.partials,
        scratch.log2_weights,
        *numbers(query, key_pages, page_tables, scale=scale, softcap=softcap, window=window),
        batch,
        num_heads,
        num_kv_heads,
        splits,
        BATCH_LANES=list_lanes(batch),
        SHARED=groups is not None,
        enable_fp_fusion=False,
        **shape.constants(softcap=softcap, window=window),
    )
    _merge_splits_kernel[(batch, triton.cdiv(num_heads, MERGE_HEADS))](
        scratch.partials,
        scratch.log2_weights,
        lengths,
        out,
        window,
        num_heads,
        splits,
        HEADS=MERGE_HEADS,
        HEAD_DIM=shape.head_dim,
        HEAD_LANES=shape.head_lanes,
        SPLIT_ENTRIES=SPLIT_ENTRIES,
        AHEAD=MERGE_AHEAD,
        WINDOWED=window > 0,
        enable_fp_fusion=False,
        num_warps=4,
    )
    return out


def layer_pages(pages: torch.Tensor, layer: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one layer's K and V, `[num_pages, kv_heads, 32, head_dim]`, as views of the arena's page blobs.

    `pages` is `[num_pages, layers, 2, kv_heads, 32, head_dim]`; the last two axes may be joined into one.
    """
    halves = pages[:, layer].view(pages.shape[0], 2, pages.shape[3], PAGE_ENTRIES, head_dim)
    return halves[:, 0], halves[:, 1]
