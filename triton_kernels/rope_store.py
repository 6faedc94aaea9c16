"""Norm and rotation of the fused product of Q, K and V, and the store of K and V into their pages.

A program handles a block of heads of one row. Heads of Q, K and V may be in the same block. Heads of Q and K are normed
(if the model has these norms) and rotated by the row's position. Heads of K and V are stored in the row's slot of its
page. A page has its K and V heads one after another, as the row does, so one store writes both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from libsym.abi import PAGE_ENTRIES

LARGEST_FLOAT8 = 448.0
"""Largest number of float8_e4m3fn, which has no infinity. Larger numbers are clamped to it."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Compile-time numbers of a launch. They depend only on the model's shape."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    half_lanes: int
    """Half of `head_dim`, padded to a power of two."""
    block_heads: int
    """Number of heads in the block of one program."""
    num_warps: int


def launch_shape(num_heads: int, num_kv_heads: int, head_dim: int) -> LaunchShape:
    """Return the launch for a model. The launch does not depend on the batch."""
    assert head_dim % 16 == 0, head_dim
    assert 16 <= head_dim <= 256, head_dim
    half_lanes = int(triton.next_power_of_2(head_dim // 2))
    all_heads = int(triton.next_power_of_2(num_heads + 2 * num_kv_heads))
    # 1,024 pairs of elements: a thread has 8 elements of each half of a head, which are 16 bytes in half precision
    block_heads = min(all_heads, 1024 // half_lanes)
    num_warps = max(1, min(4, block_heads * half_lanes // 256))
    return LaunchShape(num_heads, num_kv_heads, head_dim, half_lanes, block_heads, num_warps)


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "entry_ptr"])
def _rope_store_kernel(
    qkv_ptr: tl.tensor,  # [rows, num_heads + 2 * num_kv_heads, head_dim]
    rope_table_ptr: tl.tensor,  # [max_positions, head_dim] float32: cosines, then sines
    position_ptr: tl.tensor,  # [rows] int32
    entry_ptr: tl.tensor,  # [rows] int32: frame * 32 + slot, -1 for padding
    page_ptr: tl.tensor,  # one layer of [num_frames, layers, 2, num_kv_heads, 32, head_dim]
    q_norm_ptr: tl.tensor,  # [head_dim], read when NORM
    k_norm_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [rows, num_heads, head_dim], contiguous
    eps: tl.tensor,
    qkv_row_stride: tl.tensor,
    page_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_LANES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    LARGEST: tl.constexpr,  # stored numbers are clamped to this; 0: no clamp
) -> None:
    half: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    lanes = tl.arange(0, HALF_LANES)
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (lanes < half)[None, :]
    queries = out_ptr + row * NUM_HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM + lanes[None, :]
    is_query = (heads < NUM_HEADS)[:, None]
    entry = tl.load(entry_ptr + row)
    if entry < 0:  # unused rows of a captured graph get zeros, so that they never become NaN
        nothing = tl.zeros([BLOCK_HEADS, HALF_LANES], out_ptr.dtype.element_ty)
        tl.store(queries, nothing, mask=inside & is_query)
        tl.store(queries + half, nothing, mask=inside & is_query)
        return
    places = qkv_ptr + row * qkv_row_stride + heads[:, None] * HEAD_DIM + lanes[None, :]
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + half, mask=inside, other=0.0).to(tl.float32)
    turned = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
    if NORM:
        mean_square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM
        factor = tl.rsqrt(mean_square + eps)[:, None]
        held = lanes < half
        q_first = tl.load(q_norm_ptr + lanes, mask=held, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(q_norm_ptr + half + lanes, mask=held, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm_ptr + lanes, mask=held, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm_ptr + half + lanes, mask=held, other=0.0).to(tl.float32)[None, :]
        first = tl.where(turned, first * factor * tl.where(is_query, q_first, k_first), first)
        second = tl.where(turned, second * factor * tl.where(is_query, q_second, k_second), second)
    angles = rope_table_ptr + tl.load(position_ptr + row).to(tl.int64) * HEAD_DIM + lanes
    cos = tl.load(angles, mask=lanes < half, other=0.0)[None, :]
    sin = tl.load(angles + half, mask=lanes < half, other=0.0)[None, :]
    new_first = tl.where(turned, first * cos - second * sin, first)
    new_second = tl.where(turned, second * cos + first * sin, second)

    tl.store(queries, new_first.to(out_ptr.dtype.element_ty), mask=inside & is_query)
    tl.store(queries + half, new_second.to(out_ptr.dtype.element_ty), mask=inside & is_query)

    if LARGEST > 0.0:
        new_first = tl.clamp(new_first, -LARGEST, LARGEST)
        new_second = tl.clamp(new_second, -LARGEST, LARGEST)
    frame, slot = (entry // PAGE).to(tl.int64), entry % PAGE
    kv_heads = (heads - NUM_HEADS)[:, None]  # the heads of K, then the heads of V
    stored = page_ptr + frame * page_stride + (kv_heads * PAGE + slot) * HEAD_DIM + lanes[None, :]
    is_stored = inside & (heads >= NUM_HEADS)[:, None]
    tl.store(stored, new_first.to(page_ptr.dtype.element_ty), mask=is_stored)
    tl.store(stored + half, new_second.to(page_ptr.dtype.element_ty), mask=is_stored)


def rope_store(
    qkv: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    entries: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows' queries, normed and rotated, `[rows, num_heads, head_dim]`; store their K and V in `pages`.

    `qkv` is `[rows, (num_heads + 2 * num_kv_heads) * head_dim]`, and `pages` is `[num_frames, layers, 2, num_kv_heads,
    32, head_dim]`. `rope_table [max_positions, head_dim]` is float32: cosines, then sines. `positions [rows]` and
    `entries [rows]` are int32. An entry is `frame * 32 + slot`, or -1 for a padding row. No two rows may have the same
    entry, except -1. The position and values of a padding row are not read, and its queries are zeros. Results are
    computed in float32 and rounded once. Numbers stored as float8 are clamped.
    """
    rows = qkv.shape[0]
    head_dim = pages.shape[5]
    out = torch.empty((rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device) if out is None else out
    layer_blobs = pages[:, layer]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim, qkv.shape
    assert qkv.stride(1) == 1
    assert pages.shape[2:5] == (2, num_kv_heads, PAGE_ENTRIES), pages.shape
    assert layer_blobs[0].is_contiguous()
    assert rope_table.shape[1] == head_dim
    assert rope_table.dtype == torch.float32
    assert rope_table.is_contiguous()
    assert positions.dtype == entries.dtype == torch.int32
    assert positions.shape == entries.shape == (rows,)
    assert positions.is_contiguous()
    assert entries.is_contiguous()
    assert (q_norm is None) == (k_norm is None)
    assert out.shape == (rows, num_heads, head_dim), out.shape
    assert out.is_contiguous()
    shape = launch_shape(num_heads, num_kv_heads, head_dim)
    _rope_store_kernel[(rows, triton.cdiv(num_heads + 2 * num_kv_heads, shape.block_heads))](
        qkv,
        rope_table,
        positions,
        entries,
        layer_blobs,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        out,
        float(eps),
        qkv.stride(0),
        pages.stride(0),
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        HALF_LANES=shape.half_lanes,
        BLOCK_HEADS=shape.block_heads,
        PAGE=PAGE_ENTRIES,
        NORM=q_norm is not None,
        LARGEST=LARGEST_FLOAT8 if pages.dtype == torch.float8_e4m3fn else 0.0,
        enable_fp_fusion=True,
        num_warps=shape.num_warps,
    )
    return out
