"""Attention of one new token a sequence over its paged KV: split along the sequence, then merged.

The query heads of one KV head are packed into the rows of one matrix product (GQA), so K and V are
read once a group. The sequence is cut every `SPLIT_PAGES` pages, counted from its own start and from
nothing else: a sequence gives the same bits alone and in any batch, and a long one still fills the
machine. Each split leaves a normalised partial result and the log2 of its sum of weights; a second
kernel joins the splits of a row in order.

A split count chosen from the batch's size would fill a GPU a little better with few sequences, but
the order of the additions, and so the bits, would then depend on the neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from libsym.abi import PAGE_ENTRIES

SPLIT_PAGES = 8
"""Pages in a split. 256 entries: 32 sequences of 2,048 with 3 KV heads give 768 programs, more than 5 for each of
132 multiprocessors, while the partial results stay under 1 % of the K and V read. Part of the numbers'
contract: another value gives other bits."""

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The compile-time numbers of a launch, from the model's shape and element type alone."""

    group: int
    """Query heads of one KV head."""
    group_rows: int
    """Rows of the packed matrix product: `group`, padded to what a tensor core takes."""
    head_dim: int
    head_lanes: int
    """`head_dim`, padded to a power of two."""
    num_warps: int
    num_stages: int


def launch_shape(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> LaunchShape:
    """How to launch for this model; nothing in it depends on the batch."""
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert 64 <= head_dim <= 256, head_dim
    group = num_heads // num_kv_heads
    head_lanes = int(triton.next_power_of_2(head_dim))
    # 16 rows: the M of mma.sync. A stage is a page's K and V of one head; float32's are twice as large.
    return LaunchShape(
        group=group,
        group_rows=max(16, int(triton.next_power_of_2(group))),
        head_dim=head_dim,
        head_lanes=head_lanes,
        num_warps=4,
        num_stages=2 if dtype == torch.float32 else 3,
    )


@triton.jit
def _attend_split_kernel(
    query_ptr: tl.tensor,  # [batch, num_heads, head_dim]
    key_ptr: tl.tensor,  # [num_pages, kv_heads, 32, head_dim]
    value_ptr: tl.tensor,  # as key_ptr, same strides
    page_table_ptr: tl.tensor,  # [batch, table_pages] int32
    length_ptr: tl.tensor,  # [batch] int32
    partial_ptr: tl.tensor,  # [batch, num_heads, num_splits, head_dim] float32, contiguous
    log2_weight_ptr: tl.tensor,  # [batch, num_heads, num_splits] float32, contiguous
    scale_log2: tl.tensor,  # softmax scale times log2(e): weights are powers of two
    query_batch_stride: tl.tensor,
    query_head_stride: tl.tensor,
    page_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    entry_stride: tl.tensor,
    table_batch_stride: tl.tensor,
    num_heads: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES_PER_SPLIT: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_ptr + row)
    first_page = split * PAGES_PER_SPLIT
    if first_page * PAGE >= length:
        return
    last_page = tl.minimum(first_page + PAGES_PER_SPLIT, tl.cdiv(length, PAGE))

    members = tl.arange(0, GROUP_ROWS)
    lanes = tl.arange(0, HEAD_LANES)
    slots = tl.arange(0, PAGE)
    heads = kv_head * GROUP + members
    query_offsets = row.to(tl.int64) * query_batch_stride + heads[:, None] * query_head_stride + lanes[None, :]
    query_inside = (members < GROUP)[:, None] & (lanes < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + query_offsets, mask=query_inside, other=0.0)

    highest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    summed = tl.zeros([GROUP_ROWS, HEAD_LANES], tl.float32)
    head_offsets = kv_head * kv_head_stride + slots[:, None] * entry_stride + lanes[None, :]
    for table_index in range(first_page, last_page):
        page = tl.load(page_table_ptr + row.to(tl.int64) * table_batch_stride + table_index).to(tl.int64)
        # Slots past the length hold whatever was there before, NaN too: they must not be read, since 0 * NaN is NaN.
        held = table_index * PAGE + slots < length
        inside = held[:, None] & (lanes < HEAD_DIM)[None, :]
        key = tl.load(key_ptr + page * page_stride + head_offsets, mask=inside, other=0.0)
        value = tl.load(value_ptr + page * page_stride + head_offsets, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        scores = tl.where(held[None, :], scores, float("-inf"))
        # Every page of the loop holds at least one entry, so the new maximum is finite and nothing is inf - inf.
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        summed = summed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = new_highest

    partial_rows = (row.to(tl.int64) * num_heads + heads) * num_splits + split
    tl.store(
        partial_ptr + partial_rows[:, None] * HEAD_DIM + lanes[None, :], summed / total[:, None], mask=query_inside
    )
    tl.store(log2_weight_ptr + partial_rows, highest + tl.log2(total), mask=members < GROUP)


@triton.jit
def _merge_splits_kernel(
    partial_ptr: tl.tensor,  # [batch, num_heads, num_splits, head_dim] float32, contiguous
    log2_weight_ptr: tl.tensor,  # [batch, num_heads, num_splits] float32, contiguous
    length_ptr: tl.tensor,  # [batch] int32
    out_ptr: tl.tensor,  # [batch, num_heads, head_dim], contiguous
    num_heads: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    SPLIT_ENTRIES: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lanes = tl.arange(0, HEAD_LANES)
    inside = lanes < HEAD_DIM
    out_row = row.to(tl.int64) * num_heads + tl.program_id(1)
    used_splits = tl.cdiv(tl.load(length_ptr + row), SPLIT_ENTRIES)
    highest = float("-inf")
    total = 0.0
    summed = tl.zeros([HEAD_LANES], tl.float32)
    for split in range(used_splits):
        partial_row = out_row * num_splits + split
        log2_weight = tl.load(log2_weight_ptr + partial_row)
        partial = tl.load(partial_ptr + partial_row * HEAD_DIM + lanes, mask=inside, other=0.0)
        new_highest = tl.maximum(highest, log2_weight)
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(log2_weight - new_highest)
        total = total * shrink + weight
        summed = summed * shrink + partial * weight
        highest = new_highest
    # A row of length 0 (padding of a captured graph) attends to nothing and gives zeros.
    merged = summed / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + out_row * HEAD_DIM + lanes, merged.to(out_ptr.dtype.element_ty), mask=inside)


def paged_decode_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend `query [batch, num_heads, head_dim]` to each row's first `lengths[row]` entries.

    `key_pages` and `value_pages` are one layer's views of the arena, `[num_pages, kv_heads, 32,
    head_dim]` (see `layer_pages`); `page_tables` is `[batch, table_pages]` int32, of which row r uses
    the first `ceil(lengths[r] / 32)`. Nothing past a length is read. The host never waits for the device.
    """
    batch, num_heads, head_dim = query.shape
    _, num_kv_heads, page_entries, _ = key_pages.shape
    table_pages = page_tables.shape[1]
    assert page_entries == PAGE_ENTRIES, page_entries
    assert key_pages.shape[3] == head_dim, (key_pages.shape, query.shape)
    assert value_pages.shape == key_pages.shape
    assert value_pages.stride() == key_pages.stride()
    assert query.dtype == key_pages.dtype == value_pages.dtype
    assert query.stride(2) == key_pages.stride(3) == page_tables.stride(1) == lengths.stride(0) == 1
    assert page_tables.shape[0] == lengths.shape[0] == batch
    assert page_tables.dtype == lengths.dtype == torch.int32
    out = torch.empty((batch, num_heads, head_dim), dtype=query.dtype, device=query.device) if out is None else out
    assert out.shape == query.shape
    assert out.is_contiguous()

    shape = launch_shape(num_heads, num_kv_heads, head_dim, query.dtype)
    num_splits = max(1, triton.cdiv(table_pages, SPLIT_PAGES))
    partial = torch.empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32, device=query.device)
    log2_weight = torch.empty((batch, num_heads, num_splits), dtype=torch.float32, device=query.device)
    _attend_split_kernel[(batch, num_kv_heads, num_splits)](
        query,
        key_pages,
        value_pages,
        page_tables,
        lengths,
        partial,
        log2_weight,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        query.stride(0),
        query.stride(1),
        key_pages.stride(0),
        key_pages.stride(1),
        key_pages.stride(2),
        page_tables.stride(0),
        num_heads,
        num_splits,
        GROUP=shape.group,
        GROUP_ROWS=shape.group_rows,
        HEAD_DIM=shape.head_dim,
        HEAD_LANES=shape.head_lanes,
        PAGE=PAGE_ENTRIES,
        PAGES_PER_SPLIT=SPLIT_PAGES,
        enable_fp_fusion=True,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    _merge_splits_kernel[(batch, num_heads)](
        partial,
        log2_weight,
        lengths,
        out,
        num_heads,
        num_splits,
        HEAD_DIM=shape.head_dim,
        HEAD_LANES=shape.head_lanes,
        SPLIT_ENTRIES=SPLIT_PAGES * PAGE_ENTRIES,
        enable_fp_fusion=True,
        num_warps=1,
    )
    return out


def layer_pages(pages: torch.Tensor, layer: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's K and V, `[num_pages, kv_heads, 32, head_dim]`, as views of the arena's page blobs.

    `pages` is `[num_pages, layers, 2, kv_heads, 32 * head_dim]` with both K and V as `[32][head_dim]`.
    """
    blobs = pages[:, layer]
    halves = blobs.view(*blobs.shape[:-1], PAGE_ENTRIES, head_dim)
    return halves[:, 0], halves[:, 1]
