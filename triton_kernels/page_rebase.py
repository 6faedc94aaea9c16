"""Assembles pages from entries of other pages, each moved by a number of positions: for extract and merge.

The result must equal that of decoder/cpu/rebase.py. RoPE rotations add up, so a key that was computed at position p is
valid at position q after a rotation by q - p. V stays unchanged. K and V still depend on the entries that came before
them when they were computed. The host computes the cosine and sine of a rotation in float64, once for each distinct
shift (a merge has one shift for each file). The rest is float32, and the result is rounded to the pages' type once
more. An entry that does not move keeps its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from libsym.abi import PAGE_ENTRIES
from triton_kernels.rope_store import LARGEST_FLOAT8

NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_turns"], do_not_specialize_on_alignment=["target_ptr", "count_ptr", "kind_ptr"])
def _assemble_kernel(
    page_ptr: tl.tensor,  # [num_frames, layers, 2, kv_heads, 32, head_dim]
    source_ptr: tl.tensor,  # [n, 32] int32: frames
    slot_ptr: tl.tensor,  # [n, 32] int32
    turn_ptr: tl.tensor,  # [n, 32] int32: rows of the table, 0 for an entry that does not move
    target_ptr: tl.tensor,  # [n] int32, -1: nothing to do
    count_ptr: tl.tensor,  # [n] int32
    kind_ptr: tl.tensor,  # [layers] int32
    table_ptr: tl.tensor,  # [kinds, num_turns, head_dim] float32: cosines, then sines
    num_turns: tl.tensor,
    page_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_LANES: tl.constexpr,
    PAGE: tl.constexpr,
    LARGEST: tl.constexpr,  # stored numbers are clamped to this; 0: no clamp
) -> None:
    half: tl.constexpr = HEAD_DIM // 2
    page, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    target = tl.load(target_ptr + page).to(tl.int64)
    if target < 0:
        return
    entries = tl.arange(0, PAGE)
    lanes = tl.arange(0, HALF_LANES)
    held = entries < tl.load(count_ptr + page)
    inside = held[:, None] & (lanes < half)[None, :]
    source = tl.load(source_ptr + page * PAGE + entries, mask=held, other=0).to(tl.int64)
    slot = tl.load(slot_ptr + page * PAGE + entries, mask=held, other=0)
    turn = tl.load(turn_ptr + page * PAGE + entries, mask=held, other=0)
    keys = (layer * 2 * KV_HEADS + head) * PAGE * HEAD_DIM
    values = keys + KV_HEADS * PAGE * HEAD_DIM
    places = page_ptr + (source * page_stride + slot * HEAD_DIM)[:, None] + lanes[None, :]
    first = tl.load(places + keys, mask=inside, other=0.0)
    second = tl.load(places + keys + half, mask=inside, other=0.0)
    first_values = tl.load(places + values, mask=inside, other=0.0)
    second_values = tl.load(places + values + half, mask=inside, other=0.0)

    angles = table_ptr + ((tl.load(kind_ptr + layer) * num_turns + turn) * HEAD_DIM)[:, None] + lanes[None, :]
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + half, mask=inside, other=0.0)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    new_first = wide_first * cos - wide_second * sin
    new_second = wide_second * cos + wide_first * sin
    if LARGEST > 0.0:
        new_first = tl.clamp(new_first, -LARGEST, LARGEST)
        new_second = tl.clamp(new_second, -LARGEST, LARGEST)
    moved = (turn > 0)[:, None]
    new_first = tl.where(moved, new_first, wide_first).to(first.dtype)
    new_second = tl.where(moved, new_second, wide_second).to(first.dtype)

    all_of_them = (lanes < half)[None, :]  # stores all entries: those past the count get zeros
    places = page_ptr + target * page_stride + (entries * HEAD_DIM)[:, None] + lanes[None, :]
    tl.store(places + keys, new_first, mask=all_of_them)
    tl.store(places + keys + half, new_second, mask=all_of_them)
    tl.store(places + values, first_values, mask=all_of_them)
    tl.store(places + values + half, second_values, mask=all_of_them)


def assemble_pages(
    pages: torch.Tensor,
    targets: npt.NDArray[np.int32],
    sources: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    shifts: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    frequencies: Sequence[npt.NDArray[np.float64]],
    layer_kinds: Sequence[int],
) -> None:
    """Copy entry `slots[p, i]` of frame `sources[p, i]` to entry i of `targets[p]`, moved by `shifts[p, i]` positions.

    `pages [num_frames, layers, 2, kv_heads, 32, head_dim]` is on the device. The other arrays are on the host: `targets
    [n]` (-1: skip), and `sources`, `slots` and `shifts` as `[n, 32]`. Only the first `counts[p]` elements of a row are
    read. The other entries become zeros. `frequencies[kind] [head_dim / 2]` are radians per position for the layers of
    a kind. No frame may be both a source and a target. The host does not wait for the device.
    """
    _, layers, _, kv_heads, _, head_dim = pages.shape
    n = len(targets)
    assert sources.shape == slots.shape == shifts.shape == (n, PAGE_ENTRIES), (sources.shape, slots.shape, shifts.shape)
    assert counts.shape == (n,)
    assert len(layer_kinds) == layers
    assert pages.shape[4] == PAGE_ENTRIES
    assert pages[0].is_contiguous()
    if n == 0:
        return
    table, turns = turn_table(shifts, counts, frequencies)
    lists = (sources, slots, turns, targets, counts, np.asarray(layer_kinds))
    packed = _on_device(np.concatenate([np.asarray(each, dtype=np.int32).reshape(-1) for each in lists]), pages.device)
    _assemble_kernel[(n, layers, kv_heads)](
        pages,
        *torch.split(packed, [each.size for each in lists]),
        _on_device(table, pages.device),
        table.shape[1],
        pages.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF_LANES=int(triton.next_power_of_2(head_dim // 2)),
        PAGE=PAGE_ENTRIES,
        LARGEST=LARGEST_FLOAT8 if pages.dtype == torch.float8_e4m3fn else 0.0,
        enable_fp_fusion=True,
        num_warps=NUM_WARPS,
    )


def turn_table(
    shifts: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], frequencies: Sequence[npt.NDArray[np.float64]]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return a table with the cosines and sines of each distinct shift, `[kinds, turns, head_dim]`, and the table row
    of each entry, `[n, 32]`.

    Row 0 is for entries that do not move.
    """
    used = np.where(np.arange(PAGE_ENTRIES) < counts[:, None], shifts, 0)
    distinct, places = np.unique(used[used != 0], return_inverse=True)
    turns = np.zeros(used.shape, dtype=np.int32)
    turns[used != 0] = places + 1
    angles = np.multiply.outer(np.concatenate(([0.0], distinct)), np.asarray(frequencies))  # [turns, kinds, dim / 2]
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=2).transpose(1, 0, 2)
    return np.ascontiguousarray(table, dtype=np.float32), turns


def _on_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device from pinned memory. torch keeps this memory until the copy is done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
