"""Decode attention over a prefix that several rows share: the pages of the prefix are read once for all rows.

The rows of a group (mostly calls on forks of one KV file) have the same frames in their first pages. Their query heads
become the rows of one matrix product over these pages. Without groups, each row would have its own small product,
limited by the bandwidth of memory. The common product has hundreds of rows, and is limited by the matrix unit. Its
partial results have the same bits as in paged_decode_attention. The merge there reads these results from the same
memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from triton_kernels.attention_launch import list_lanes, num_splits, numbers, wide_shape
from triton_kernels.attention_splits import (
    SPLIT_ENTRIES,
    SPLIT_PAGES,
    finish_split,
    frame_offsets,
    load_frames,
    score_step,
    sum_step,
)

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of rows of a batch that share their first pages, as int32 on the device. Unused groups are empty."""

    first: torch.Tensor
    """[groups + 1]: the members of group g are `rows[first[g]:first[g + 1]]`."""
    rows: torch.Tensor
    """[members of all groups]: indexes of rows in the batch."""
    splits: torch.Tensor
    """[groups]: number of whole splits whose frames all members of a group share."""
    row_splits: torch.Tensor
    """[batch]: number of each row's splits that the row's group computes; 0: the row has no group."""


@triton.jit(do_not_specialize=["table_batch_stride", "num_groups", "num_splits"])
def _attend_prefixes_kernel(
    query_ptr: tl.tensor,  # [batch, num_heads, head_dim]
    key_ptr: tl.tensor,  # [num_pages, kv_heads, 32, head_dim]
    value_ptr: tl.tensor,  # as key_ptr, same strides
    page_table_ptr: tl.tensor,  # [batch, table_pages] int32
    length_ptr: tl.tensor,  # [batch] int32
    first_ptr: tl.tensor,  # [num_groups + 1] int32
    member_ptr: tl.tensor,  # [first[num_groups]] int32
    splits_ptr: tl.tensor,  # [num_groups] int32
    partial_ptr: tl.tensor,  # [batch, num_heads, num_splits, head_dim] float32, contiguous
    log2_weight_ptr: tl.tensor,  # [batch, num_heads, num_splits] float32, contiguous
    score_scale: tl.tensor,
    log2_scale: tl.tensor,
    window: tl.tensor,
    query_batch_stride: tl.tensor,
    query_head_stride: tl.tensor,
    page_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    entry_stride: tl.tensor,
    table_batch_stride: tl.tensor,
    num_groups: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    num_splits: tl.tensor,
    GROUP_LANES: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT_STEPS: tl.constexpr,
    TOTAL_LANES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    # The work list has, for each group, split and KV head, the tiles of members. These tiles follow each other, so that
    # later tiles find K and V in the L2 cache.
    groups = tl.arange(0, GROUP_LANES)
    held = groups < num_groups
    firsts = tl.load(first_ptr + groups, mask=held, other=0)
    sizes = tl.load(first_ptr + groups + 1, mask=held, other=0) - firsts
    tiles = (sizes + MEMBERS - 1) // MEMBERS
    counts = tiles * tl.load(splits_ptr + groups, mask=held, other=0)
    ends = tl.cumsum(counts, axis=0)
    num_items = tl.sum(counts, axis=0) * num_kv_heads

    tile_rows = tl.arange(0, TILE_ROWS)
    lanes = tl.arange(0, HEAD_LANES)
    slots = tl.arange(0, STEP)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        # The list has the items of one group after those of another, so the group of an item does not depend on its KV
        # head.
        group = tl.sum((ends * num_kv_heads <= item).to(tl.int32), axis=0)
        chosen = groups == group
        group_tiles = tl.sum(tl.where(chosen, tiles, 0), axis=0)
        first = tl.sum(tl.where(chosen, firsts, 0), axis=0)
        size = tl.sum(tl.where(chosen, sizes, 0), axis=0)
        unit = item - tl.sum(tl.where(chosen, ends - counts, 0), axis=0) * num_kv_heads
        kv_head = unit // group_tiles % num_kv_heads
        split = unit // group_tiles // num_kv_heads

        members = unit % group_tiles * MEMBERS + tile_rows // GROUP
        inside_rows = (tile_rows < MEMBERS * GROUP) & (members < size)
        # Rows past the last member are copies of the first row. Their results are not stored.
        rows = tl.load(member_ptr + first + tl.where(inside_rows, members, 0))
        heads = kv_head * GROUP + tile_rows % GROUP
        inside_tile = inside_rows[:, None] & (lanes < HEAD_DIM)[None, :]
        query_rows = rows.to(tl.int64) * query_batch_stride + heads * query_head_stride
        query = tl.load(query_ptr + query_rows[:, None] + lanes[None, :], mask=inside_tile, other=0.0)
        lowest = tl.zeros([TILE_ROWS], tl.int32)
        most_lowest = 0
        first_step = split * SPLIT_STEPS
        if WINDOWED:
            lengths = tl.load(length_ptr + rows)
            lowest = tl.maximum(lengths - window, 0)
            most_lowest = tl.max(lowest, axis=0)
            first_step = tl.maximum(first_step, tl.min(lowest, axis=0) // STEP)
        table_ptr = page_table_ptr + tl.load(member_ptr + first).to(tl.int64) * table_batch_stride
        entry_offsets = kv_head * kv_head_stride + (slots % PAGE)[:, None] * entry_stride + lanes[None, :]
        highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS, TOTAL_LANES], tl.float32)
        summed = tl.zeros([TILE_ROWS, HEAD_LANES], tl.float32)
        num_pages = (split + 1) * SPLIT_STEPS * (STEP // PAGE)
        first_frame, second_frame = load_frames(table_ptr, first_step, num_pages)
        for step in range(first_step, (split + 1) * SPLIT_STEPS):
            offsets = frame_offsets(first_frame, second_frame, page_stride, slots, PAGE)[:, None] + entry_offsets
            first_frame, second_frame = load_frames(table_ptr, step + 1, num_pages)
            inside = (lanes < HEAD_DIM)[None, :]
            key = tl.load(key_ptr + offsets, mask=inside, other=0.0).to(query.dtype)
            value = tl.load(value_ptr + offsets, mask=inside, other=0.0).to(query.dtype)
            seen = (step * STEP + slots)[None, :] >= lowest[:, None]
            partly_seen = step * STEP < most_lowest
            scores = score_step(query, key, seen, partly_seen, score_scale, SOFTCAP)
            highest, total, summed = sum_step(scores, value, highest, total, summed, log2_scale)
        partial, log2_weight = finish_split(highest, total, summed)
        partial_rows = (rows.to(tl.int64) * num_heads + heads) * num_splits + split
        tl.store(partial_ptr + partial_rows[:, None] * HEAD_DIM + lanes[None, :], partial, mask=inside_tile)
        tl.store(log2_weight_ptr + partial_rows, log2_weight, mask=inside_rows)


def attend_shared_prefixes(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    lengths: torch.Tensor,
    groups: SharedPrefixes,
    partials: torch.Tensor,
    log2_weights: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
) -> None:
    """Write the partial results of the groups' splits into the scratch memory of the caller, paged_decode_attention."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads = key_pages.shape[1]
    num_groups = groups.splits.shape[0]
    splits = num_splits(page_tables.shape[1])
    assert groups.first.shape[0] == num_groups + 1
    assert groups.row_splits.shape[0] == batch
    assert groups.first.dtype == groups.rows.dtype == groups.splits.dtype == groups.row_splits.dtype == torch.int32
    if num_groups == 0:
        return
    shape = wide_shape(num_heads, num_kv_heads, head_dim, query.dtype, key_pages.dtype)
    most_tiles = groups.rows.shape[0] // shape.tile_tokens + num_groups
    _attend_prefixes_kernel[(shape.num_programs(most_tiles * splits * num_kv_heads, query.device),)](
        query,
        key_pages,
        value_pages,
        page_tables,
        lengths,
        groups.first,
        groups.rows,
        groups.splits,
        partials,
        log2_weights,
        *numbers(query, key_pages, page_tables, scale=scale, softcap=softcap, window=window),
        num_groups,
        num_heads,
        num_kv_heads,
        splits,
        GROUP_LANES=list_lanes(num_groups),
        MEMBERS=shape.tile_tokens,
        enable_fp_fusion=False,
        **shape.constants(softcap=softcap, window=window),
    )


def find_groups(page_tables: Int32Array, lengths: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
    """Find groups of rows that share whole splits, on the host: `(first, rows, splits, row_splits)` of SharedPrefixes.

    A row is in at most one group, and the groups are chosen to save the most reads: a group of m rows that share s
    splits saves (m - 1) * s. Forks of forks form a tree of prefixes. A node gets its own group if its rows save more
    reads in that group than in the group of a node above.
    """
    candidates = _rows_that_share_their_first_split(page_tables, lengths)
    groups: list[tuple[list[int], int]] = []
    if candidates.size:
        order, common = _sorted_prefixes(page_tables[candidates], lengths[candidates] // SPLIT_ENTRIES)
        chosen = _Forks(common.tolist(), {}, {}).groups(0, len(order), 0, [])
        groups = [(sorted(candidates[order[members]].tolist()), shared) for members, shared in chosen]
    first = np.cumsum([0, *(len(members) for members, _ in groups)], dtype=np.int32)
    rows = np.array([row for members, _ in groups for row in members], dtype=np.int32)
    splits = np.array([shared for _, shared in groups], dtype=np.int32)
    row_splits = np.zeros(len(lengths), dtype=np.int32)
    row_splits[rows] = np.repeat(splits, np.diff(first))
    return first, rows, splits, row_splits


def _rows_that_share_their_first_split(page_tables: Int32Array, lengths: Int32Array) -> npt.NDArray[np.int64]:
    """Return the rows that share their first split with another row. Most batches have no such rows, and then only a
    few columns are read.
    """
    long_enough = np.flatnonzero(lengths >= SPLIT_ENTRIES)
    if long_enough.size < 2:  # with fewer than two such rows, the page tables may be narrower than a split
        return long_enough[:0]
    beginnings = [beginning.tobytes() for beginning in page_tables[long_enough, :SPLIT_PAGES]]
    count = Counter(beginnings)
    return long_enough[[count[beginning] > 1 for beginning in beginnings]]


def _sorted_prefixes(
    page_tables: Int32Array, whole_splits: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows sorted by their frames, and the number of splits that each row shares with the next row."""
    most = int(whole_splits.max())
    tables = page_tables[:, : most * SPLIT_PAGES].reshape(len(page_tables), most, SPLIT_PAGES)
    tables = np.where((np.arange(most) < whole_splits[:, None])[:, :, None], tables, -1)
    rows = [table.tobytes() for table in tables]
    order = np.array(sorted(range(len(rows)), key=rows.__getitem__))
    equal = (tables[order[1:]] == tables[order[:-1]]).all(axis=2)
    agreeing = np.where(equal.all(axis=1), most, equal.argmin(axis=1))
    shorter = np.minimum(whole_splits[order[1:]], whole_splits[order[:-1]])
    return order, np.minimum(agreeing, shorter)


@dataclass(frozen=True, slots=True)
class _Forks:
    """Tree of the prefixes of rows, which are sorted by their frames. A node is a range of rows: `low` up to `high`."""

    common: list[int]
    """Number of splits that each row shares with the next row."""
    parts: dict[tuple[int, int], tuple[int, list[tuple[int, int]]]]
    saved: dict[tuple[int, int, int], int]

    def children(self, low: int, high: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the number of splits that all rows of a node share, and the ranges of rows within the node that share
        more.
        """
        if (low, high) not in self.parts:
            depth = min(self.common[low : high - 1])
            cuts = [low, *(row + 1 for row in range(low, high - 1) if self.common[row] == depth), high]
            self.parts[low, high] = depth, list(itertools.pairwise(cuts))
        return self.parts[low, high]

    def most_saved(self, low: int, high: int, above: int) -> int:
        """Return the largest number of splits that these rows can save, if each row may join a group above that shares
        `above` splits.
        """
        if high - low == 1:
            return above
        key = (low, high, above)
        if key not in self.saved:
            depth, parts = self.children(low, high)
            best = sum(self.most_saved(*part, above) for part in parts)
            if depth > above:
                best = max(best, sum(self.most_saved(*part, depth) for part in parts) - depth)
            self.saved[key] = best
        return self.saved[key]

    def groups(self, low: int, high: int, above: int, joining: list[int]) -> Iterator[tuple[list[int], int]]:
        """Yield the groups `(rows, splits)` that save the most. Add the rows that join the group above to `joining`."""
        if high - low == 1:
            joining.append(low)
            return
        depth, parts = self.children(low, high)
        if depth > above and sum(self.most_saved(*part, above) for part in parts) < self.most_saved(low, high, above):
            members: list[int] = []
            for part in parts:
                yield from self.groups(*part, depth, members)
            yield members, depth
        else:
            for part in parts:
                yield from self.groups(*part, above, joining)
