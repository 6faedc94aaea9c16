"""Attention mass: for each KV head, the sum of the weights that each entry gets from the rows of a chunk.

Attention keeps no weights, so two kernels compute them again. The first finds the logarithm of each row's sum of
weights. The second walks the rows for each step of entries and adds up exp2(score - logarithm). Neither kernel reads V.
The mass of an entry is summed tile by tile. So another cut of the prompt into chunks changes the mass by rounding
errors. Query, keys and scores are computed as in attention.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from libsym.abi import PAGE_ENTRIES
from triton_kernels.attention_launch import check_paged, numbers, wide_shape
from triton_kernels.attention_splits import STEP_ENTRIES, frame_offsets, load_frames, score_step
from triton_kernels.paged_prefill_attention import Int32Array


@triton.jit
def _seen_entries(
    entries: tl.tensor,  # [step entries]
    row_entries: tl.tensor,  # [rows]: index of each row's own entry
    inside_rows: tl.tensor,  # [rows]
    window: tl.tensor,
    mask_ptr: tl.tensor,
    mask_first: tl.tensor,
    words: tl.tensor,  # number of words in a row of the mask; 0: the chunk has no mask
    positions: tl.tensor,  # [rows] within the chunk
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKS: tl.constexpr,
) -> tl.tensor:
    """Return `[rows, step entries]`: whether causality, the window and the mask let a row see an entry."""
    seen = (entries[None, :] <= row_entries[:, None]) & inside_rows[:, None]
    if WINDOWED:
        seen = seen & (entries[None, :] > row_entries[:, None] - window)
    if MASKS:
        word_ptrs = mask_ptr + mask_first.to(tl.int64) + positions.to(tl.int64)[:, None] * words
        word_index = entries // PAGE
        has_word = inside_rows[:, None] & (word_index < words)[None, :]
        row_words = tl.load(word_ptrs + word_index[None, :], mask=has_word, other=-1)
        seen = seen & (((row_words >> (entries % PAGE)[None, :]) & 1) != 0)
    return seen


@triton.jit(do_not_specialize=["table_chunk_stride"])
def _measure_kernel(
    query_ptr: tl.tensor,  # [rows, num_heads, head_dim]
    key_ptr: tl.tensor,  # [num_pages, kv_heads, 32, head_dim]
    page_table_ptr: tl.tensor,  # [chunks, table_pages] int32
    start_ptr: tl.tensor,  # [chunks] int32: entries before the chunk
    first_row_ptr: tl.tensor,  # [chunks + 1] int32
    tile_ptr: tl.tensor,  # [tiles, 2] int32: chunk, first row within it
    mask_ptr: tl.tensor,  # int32 words, read when MASKS
    mask_first_ptr: tl.tensor,  # [chunks] int32, -1 without a mask
    mask_words_ptr: tl.tensor,  # [chunks] int32
    level_ptr: tl.tensor,  # [rows, num_heads] float32: log2 of the sum of weights
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
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKS: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    chunk = tl.load(tile_ptr + 2 * tl.program_id(1))
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
    rows = (first_row + positions).to(tl.int64)
    query_rows = rows * query_row_stride + heads * query_head_stride
    inside_tile = inside_rows[:, None] & (lanes < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + query_rows[:, None] + lanes[None, :], mask=inside_tile, other=0.0)
    length = start + tl.minimum(tile_first + POSITIONS, num_rows)
    num_pages = tl.cdiv(length, PAGE)
    first_step = 0
    if WINDOWED:
        first_step = tl.maximum(start + tile_first + 1 - window, 0) // STEP
    mask_first = chunk
    words = chunk
    if MASKS:
        mask_first = tl.load(mask_first_ptr + chunk)
        words = tl.where(mask_first >= 0, tl.load(mask_words_ptr + chunk), 0)
    table_ptr = page_table_ptr + chunk.to(tl.int64) * table_chunk_stride
    entry_offsets = kv_head * kv_head_stride + (slots % PAGE)[:, None] * entry_stride + lanes[None, :]
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    first_frame, second_frame = load_frames(table_ptr, first_step, num_pages)
    for step in range(first_step, tl.cdiv(length, STEP)):
        entries = step * STEP + slots
        inside = (entries < length)[:, None] & (lanes < HEAD_DIM)[None, :]
        offsets = frame_offsets(first_frame, second_frame, page_stride, slots, PAGE)[:, None] + entry_offsets
        first_frame, second_frame = load_frames(table_ptr, step + 1, num_pages)
        key = tl.load(key_ptr + offsets, mask=inside, other=0.0).to(query.dtype)
        seen = _seen_entries(
            entries,
            start + positions,
            inside_rows,
            window,
            mask_ptr,
            mask_first,
            words,
            positions,
            PAGE,
            WINDOWED,
            MASKS,
        )
        logs = score_step(query, key, seen, True, score_scale, SOFTCAP) * log2_scale
        new_highest = tl.maximum(highest, tl.max(logs, axis=1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(logs - base[:, None]), axis=1)
        highest = new_highest
    level = highest + tl.log2(tl.where(total > 0.0, total, 1.0))
    tl.store(level_ptr + rows * num_heads + heads, level, mask=inside_rows)


@triton.jit(do_not_specialize=["table_chunk_stride", "num_columns"])
def _spread_kernel(
    query_ptr: tl.tensor,  # these arguments, up to the masks, are as in _measure_kernel
    key_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    start_ptr: tl.tensor,
    first_row_ptr: tl.tensor,
    step_ptr: tl.tensor,  # [steps, 2] int32: chunk, index of the step within it
    mask_ptr: tl.tensor,
    mask_first_ptr: tl.tensor,
    mask_words_ptr: tl.tensor,
    level_ptr: tl.tensor,  # [rows, num_heads] float32
    first_column_ptr: tl.tensor,  # [chunks] int32
    mass_ptr: tl.tensor,  # [kv_heads, num_columns] float32
    num_columns: tl.tensor,
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
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKS: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    chunk = tl.load(step_ptr + 2 * tl.program_id(1))
    step = tl.load(step_ptr + 2 * tl.program_id(1) + 1)
    first_row = tl.load(first_row_ptr + chunk)
    num_rows = tl.load(first_row_ptr + chunk + 1) - first_row
    start = tl.load(start_ptr + chunk)
    length = start + num_rows
    tile_rows = tl.arange(0, TILE_ROWS)
    lanes = tl.arange(0, HEAD_LANES)
    slots = tl.arange(0, STEP)
    heads = kv_head * GROUP + tile_rows % GROUP
    entries = step * STEP + slots
    table_ptr = page_table_ptr + chunk.to(tl.int64) * table_chunk_stride
    first_frame, second_frame = load_frames(table_ptr, step, tl.cdiv(length, PAGE))
    offsets = frame_offsets(first_frame, second_frame, page_stride, slots, PAGE)[:, None]
    offsets = offsets + kv_head * kv_head_stride + (slots % PAGE)[:, None] * entry_stride + lanes[None, :]
    inside = (entries < length)[:, None] & (lanes < HEAD_DIM)[None, :]
    key = tl.load(key_ptr + offsets, mask=inside, other=0.0).to(query_ptr.dtype.element_ty)
    mask_first = chunk
    words = chunk
    if MASKS:
        mask_first = tl.load(mask_first_ptr + chunk)
        words = tl.where(mask_first >= 0, tl.load(mask_words_ptr + chunk), 0)
    # Rows before the step's first entry see none of its entries. With a window, rows far after its last entry do not
    # see them either.
    first_tile = tl.maximum(step * STEP - start, 0) // POSITIONS
    end_row = num_rows
    if WINDOWED:
        end_row = tl.minimum(num_rows, tl.maximum((step + 1) * STEP - 1 + window - start, 0))
    mass = tl.zeros([STEP], tl.float32)
    for tile in range(first_tile, tl.cdiv(end_row, POSITIONS)):
        positions = tile * POSITIONS + tile_rows // GROUP
        inside_rows = (tile_rows < POSITIONS * GROUP) & (positions < num_rows)
        rows = (first_row + positions).to(tl.int64)
        query_rows = rows * query_row_stride + heads * query_head_stride
        inside_tile = inside_rows[:, None] & (lanes < HEAD_DIM)[None, :]
        query = tl.load(query_ptr + query_rows[:, None] + lanes[None, :], mask=inside_tile, other=0.0)
        level = tl.load(level_ptr + rows * num_heads + heads, mask=inside_rows, other=0.0)
        seen = _seen_entries(
            entries,
            start + positions,
            inside_rows,
            window,
            mask_ptr,
            mask_first,
            words,
            positions,
            PAGE,
            WINDOWED,
            MASKS,
        )
        logs = score_step(query, key, seen, True, score_scale, SOFTCAP) * log2_scale
        mass += tl.sum(tl.exp2(logs - level[:, None]), axis=0)
    first_column = tl.load(first_column_ptr + chunk)
    columns = kv_head.to(tl.int64) * num_columns + first_column + entries
    tl.store(mass_ptr + columns, mass, mask=entries < length)


def attention_mass(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    page_tables: torch.Tensor,
    starts: torch.Tensor,
    first_rows: torch.Tensor,
    tiles: torch.Tensor,
    steps: torch.Tensor,
    first_columns: torch.Tensor,
    *,
    levels: torch.Tensor,
    out: torch.Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    masks: torch.Tensor | None = None,
    mask_first: torch.Tensor | None = None,
    mask_words: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add up the attention that entries get from the rows of chunks, over the query heads of each KV head.

    Return `out [kv_heads, columns]`, float32.

    Chunks, rows, entries, windows and masks are as in `paged_prefill_attention`. `tiles` is from `prefill_tiles`, and
    `steps [n, 2]` is from `mass_steps`. Both list only the chunks that ask for mass. Entry e of chunk c has column
    `first_columns[c] + e`. Columns without a chunk stay unchanged. `levels [rows, num_heads]`, float32, is scratch
    memory between the two kernels.
    """
    rows, num_heads, head_dim = query.shape
    num_kv_heads, chunks = key_pages.shape[1], page_tables.shape[0]
    check_paged(query, key_pages, key_pages, page_tables)
    assert tiles.is_contiguous()
    assert steps.is_contiguous()
    assert tiles.shape[1] == steps.shape[1] == 2
    assert starts.shape == first_columns.shape == (chunks,)
    assert first_rows.shape == (chunks + 1,)
    assert levels.shape == (rows, num_heads)
    assert out.shape[0] == num_kv_heads
    assert levels.dtype == out.dtype == torch.float32
    assert levels.is_contiguous()
    assert out.is_contiguous()
    lists = [page_tables, starts, first_rows, tiles, steps, first_columns]
    if masks is not None:
        assert mask_first is not None
        assert mask_words is not None
        assert mask_first.shape == mask_words.shape == (chunks,)
        lists += [masks, mask_first, mask_words]
    assert all(each.dtype == torch.int32 for each in lists)

    shape = wide_shape(num_heads, num_kv_heads, head_dim, query.dtype, key_pages.dtype)
    constants = shape.constants(softcap=softcap, window=window)
    for name in ("SPLIT_STEPS", "TOTAL_LANES"):
        del constants[name]
    scalars = numbers(query, key_pages, page_tables, scale=scale, softcap=softcap, window=window)
    mask_lists = (
        tiles if masks is None else masks,
        tiles if mask_first is None else mask_first,
        tiles if mask_words is None else mask_words,
    )
    common = {"POSITIONS": shape.tile_tokens, "MASKS": masks is not None, **constants}
    if tiles.shape[0]:
        _measure_kernel[(num_kv_heads, tiles.shape[0])](
            query,
            key_pages,
            page_tables,
            starts,
            first_rows,
            tiles,
            *mask_lists,
            levels,
            *scalars,
            num_heads,
            enable_fp_fusion=True,
            **common,
        )
        _spread_kernel[(num_kv_heads, steps.shape[0])](
            query,
            key_pages,
            page_tables,
            starts,
            first_rows,
            steps,
            *mask_lists,
            levels,
            first_columns,
            out,
            out.shape[1],
            *scalars,
            num_heads,
            enable_fp_fusion=True,
            **common,
        )
    return out


def mass_steps(num_entries: Int32Array) -> Int32Array:
    """Return `[steps, 2]` int32: for each step, the chunk and the step's index in the chunk. `num_entries` is 0 for
    chunks without mass.
    """
    counts = -(-np.asarray(num_entries, dtype=np.int64) // STEP_ENTRIES)
    chunks = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([chunks, within], axis=1).astype(np.int32)


assert STEP_ENTRIES % PAGE_ENTRIES == 0
