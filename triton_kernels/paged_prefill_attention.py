"""Attention of the new tokens of several sequences over their paged KV, including the tokens' own entries.

A tile has the query heads of one KV head for some consecutive rows of a chunk. The tile walks the pages from the start
of the sequence to the entry of its last row. Scores are masked only in steps of which some row of the tile does not see
all entries. With `invariant` the tile walks the splits of decode (attention_splits.py), and merges them in order in
registers. So a token has the same bits for any cut of its prompt into chunks, and the same bits as a decode step at its
position. Without `invariant`, one softmax runs from the first page to the last. So no split is merged, and a thread
needs 64 fewer registers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from triton_kernels.attention_launch import LaunchShape, check_paged, numbers, output_for, wide_shape
from triton_kernels.attention_splits import (
    finish_merge,
    finish_split,
    frame_offsets,
    load_frames,
    merge_split,
    score_step,
    sum_step,
)

Int32Array = npt.NDArray[np.int32]


@triton.jit(do_not_specialize=["table_chunk_stride"])
def _attend_tiles_kernel(
    query_ptr: tl.tensor,  # [rows, num_heads, head_dim]
    key_ptr: tl.tensor,  # [num_pages, kv_heads, 32, head_dim]
    value_ptr: tl.tensor,  # as key_ptr, same strides
    page_table_ptr: tl.tensor,  # [chunks, table_pages] int32
    start_ptr: tl.tensor,  # [chunks] int32: entries before the chunk
    first_row_ptr: tl.tensor,  # [chunks + 1] int32
    tile_ptr: tl.tensor,  # [tiles, 2] int32: chunk, first row within it
    mask_ptr: tl.tensor,  # int32 words, read when MASKS
    mask_first_ptr: tl.tensor,  # [chunks] int32, -1 without a mask
    mask_words_ptr: tl.tensor,  # [chunks] int32
    out_ptr: tl.tensor,  # [rows, num_heads, head_dim], contiguous
    score_scale: tl.tensor,
    log2_scale: tl.tensor,
    window: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    page_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    entry_stride: tl.tensor,
    table_chunk_stride: tl.tensor,
    num_heads: tl.tensor,
    GROUP: tl.constexpr,
    POSITIONS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT_STEPS: tl.constexpr,
    TOTAL_LANES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKS: tl.constexpr,
    INVARIANT: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    chunk = tl.load(tile_ptr + 2 * tl.program_id(1))
    if chunk < 0:
        return
    tile_first = tl.load(tile_ptr + 2 * tl.program_id(1) + 1)
    first_row = tl.load(first_row_ptr + chunk)
    num_rows = tl.load(first_row_ptr + chunk + 1) - first_row
    start = tl.load(start_ptr + chunk)

    tile_rows = tl.arange(0, TILE_ROWS)
    lanes = tl.arange(0, HEAD_LANES)
    slots = tl.arange(0, STEP)
    positions = tile_first + tile_rows // GROUP
    heads = kv_head * GROUP + tile_rows % GROUP
    inside_rows = (tile_rows < POSITIONS * GROUP) & (positions < num_rows)
    inside_tile = inside_rows[:, None] & (lanes < HEAD_DIM)[None, :]
    rows = (first_row + positions).to(tl.int64)
    query_rows = rows * query_row_stride + heads * query_head_stride
    query = tl.load(query_ptr + query_rows[:, None] + lanes[None, :], mask=inside_tile, other=0.0)

    row_entries = start + positions
    length = start + tl.minimum(tile_first + POSITIONS, num_rows)
    num_pages = tl.cdiv(length, PAGE)
    first_step = 0
    # Steps from `first_full` to `last_full` need no mask, because every row sees all of their entries.
    first_full = 0
    last_full = (start + tile_first + 1) // STEP
    if WINDOWED:
        first_step = tl.maximum(start + tile_first + 1 - window, 0) // STEP
        first_full = tl.cdiv(tl.maximum(length - window, 0), STEP)
    mask_ptrs = mask_ptr + tl.zeros_like(rows)
    mask_words = tl.zeros_like(positions)
    if MASKS:
        mask_first = tl.load(mask_first_ptr + chunk)
        words = tl.load(mask_words_ptr + chunk)
        mask_ptrs = mask_ptr + mask_first.to(tl.int64) + positions.to(tl.int64) * words
        mask_words = tl.where(inside_rows & (mask_first >= 0), words, 0)
        last_full = tl.where(mask_first >= 0, 0, last_full)

    table_ptr = page_table_ptr + chunk.to(tl.int64) * table_chunk_stride
    entry_offsets = kv_head * kv_head_stride + (slots % PAGE)[:, None] * entry_stride + lanes[None, :]
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS, TOTAL_LANES], tl.float32)
    summed = tl.zeros([TILE_ROWS, HEAD_LANES], tl.float32)
    merged_highest = highest
    merged_total = tl.zeros([TILE_ROWS], tl.float32)
    merged = summed
    first_frame, second_frame = load_frames(table_ptr, first_step, num_pages)
    for step in range(first_step, tl.cdiv(length, STEP)):
        entries = step * STEP + slots
        # Slots past the tile's last entry were never written. They must not be read, because 0 * NaN is NaN.
        inside = (entries < length)[:, None] & (lanes < HEAD_DIM)[None, :]
        offsets = frame_offsets(first_frame, second_frame, page_stride, slots, PAGE)[:, None] + entry_offsets
        first_frame, second_frame = load_frames(table_ptr, step + 1, num_pages)
        key = tl.load(key_ptr + offsets, mask=inside, other=0.0).to(query.dtype)
        value = tl.load(value_ptr + offsets, mask=inside, other=0.0).to(query.dtype)
        seen = entries[None, :] <= row_entries[:, None]
        partly_seen = (step < first_full) | (step >= last_full)
        if WINDOWED:
            seen = seen & (entries[None, :] > row_entries[:, None] - window)
        if MASKS:
            for ahead in tl.static_range(STEP // PAGE):
                word_index = step * (STEP // PAGE) + ahead
                row_words = tl.load(mask_ptrs + word_index, mask=word_index < mask_words, other=-1)
                bits = (row_words[:, None] >> (slots % PAGE)[None, :]) & 1
                seen = seen & ((bits != 0) | (slots // PAGE != ahead)[None, :])
        scores = score_step(query, key, seen, partly_seen, score_scale, SOFTCAP)
        # At the start of a split, merge the previous split. The merge is here, between the products, where the kernel
        # waits for the products of the previous step. At the end of a step Triton (3.6 to 3.9) does not wait for wgmma
        # before a branch reads its accumulator; ptxas detects this and then serialises each wgmma of the loop.
        if INVARIANT:  # noqa: SIM102 -- decided at compile time
            if step % SPLIT_STEPS == 0:
                partial, log2_weight = finish_split(highest, total, summed)
                merged_highest, merged_total, merged = merge_split(
                    merged_highest, merged_total, merged, partial, log2_weight
                )
                # `total` and `summed` are multiplied by exp2(-inf) below.
                highest = tl.zeros_like(highest) + float("-inf")
        highest, total, summed = sum_step(scores, value, highest, total, summed, log2_scale)
    if INVARIANT:
        partial, log2_weight = finish_split(highest, total, summed)
        merged_highest, merged_total, merged = merge_split(merged_highest, merged_total, merged, partial, log2_weight)
        result = finish_merge(merged_total, merged)
    else:
        result = finish_merge(tl.max(total, axis=1), summed)
    out_rows = rows * num_heads + heads
    tl.store(
        out_ptr + out_rows[:, None] * HEAD_DIM + lanes[None, :], result.to(out_ptr.dtype.element_ty), mask=inside_tile
    )


def paged_prefill_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    starts: torch.Tensor,
    first_rows: torch.Tensor,
    tiles: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    masks: torch.Tensor | None = None,
    mask_first: torch.Tensor | None = None,
    mask_words: torch.Tensor | None = None,
    invariant: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend the rows of chunks, `query [rows, num_heads, head_dim]`, to the entries of their sequences.

    Chunk c has rows `first_rows[c]` to `first_rows[c + 1]`; its row i sees entries 0 to `starts[c] + i`. With a
    `window`, the row sees only the last `window` of these entries, and with a mask only entries whose bit is set. The
    chunk's own entries are in the pages already (`page_tables [chunks, table_pages]`). A row of a mask has
    `mask_words[c]` int32 words, with bit j of word p for slot j of page p. Chunk c's first row begins at word
    `mask_first[c]` of `masks`; -1 means no mask. `tiles [n, 2]` is from `prefill_tiles`; a chunk of -1 is padding. Rows
    outside all tiles stay unchanged.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads, chunks = key_pages.shape[1], page_tables.shape[0]
    check_paged(query, key_pages, value_pages, page_tables)
    assert tiles.is_contiguous()
    assert tiles.shape[1] == 2
    assert starts.shape == (chunks,)
    assert first_rows.shape == (chunks + 1,)
    lists = [page_tables, starts, first_rows, tiles]
    if masks is not None:
        assert mask_first is not None
        assert mask_words is not None
        assert mask_first.shape == mask_words.shape == (chunks,)
        lists += [masks, mask_first, mask_words]
    assert all(each.dtype == torch.int32 for each in lists)
    out = output_for(query, out)
    if tiles.shape[0] == 0:
        return out

    shape = wide_shape(num_heads, num_kv_heads, head_dim, query.dtype, key_pages.dtype)
    _attend_tiles_kernel[(num_kv_heads, tiles.shape[0])](
        query,
        key_pages,
        value_pages,
        page_tables,
        starts,
        first_rows,
        tiles,
        tiles if masks is None else masks,
        tiles if mask_first is None else mask_first,
        tiles if mask_words is None else mask_words,
        out,
        *numbers(query, key_pages, page_tables, scale=scale, softcap=softcap, window=window),
        num_heads,
        POSITIONS=shape.tile_tokens,
        MASKS=masks is not None,
        INVARIANT=invariant,
        enable_fp_fusion=not invariant,
        **shape.constants(softcap=softcap, window=window),
    )
    return out


def prefill_tiles(lengths: Int32Array, shape: LaunchShape) -> Int32Array:
    """Return `[tiles, 2]` int32 for chunks of these lengths, on the host: for each tile, the chunk and the tile's first
    row within the chunk.

    Tiles with the last rows of a chunk come first. These rows see the most entries, and the tiles that start last
    should be short.
    """
    counts = -(-np.asarray(lengths, dtype=np.int64) // shape.tile_tokens)
    chunks = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.argsort(-within, kind="stable")
    return np.stack([chunks, within * shape.tile_tokens], axis=1)[order].astype(np.int32)
