"""The product of a few or many rows with a weight matrix, whose bits do not depend on how many rows there are.

Each element of the result is the same chain of additions in every launch: the inner dimension is cut into
splits that the matrix's shape alone decides; a split is summed from its first block to its last by one chain
of matrix instructions from zero; the splits' float32 sums are added in order; then come the bias and one rounding.
A library's product chooses its kernel, and with it that order, by the number of rows.

The weights are the left operand and the rows the right one (`out^T = weight @ x^T`): 128 weight rows fill
Hopper's widest matrix instruction whatever the batch, and few rows are padded to 16, not to 64. The number of
columns of an instruction changes with the number of rows, never what is added to an element of it.

For few rows a product is bound by reading the weights, and a small matrix has too few tiles for all
multiprocessors: each split is a program of its own, and the last of a tile to end adds up all of them, in order.
For many rows there are tiles enough: one program walks the splits of its tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MULTIPROCESSORS = 132
"""What a matrix is cut for. An H100's and H200's; fixed, since another cut gives other bits."""
MIN_SPLIT = 512
"""Inputs of the shortest split: 8 blocks, so that filling and draining the pipeline stays a small part."""
MAX_SPLITS = 8
SPREAD_BELOW = 100
"""Tiles: with fewer, a split is a program of its own. The partial sums stay under 26 MB at Llama-3-8B's shape."""
ROW_GROUP = 8
"""Row tiles whose programs run side by side over the same weights, so that both stay in the L2 cache."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a matrix is cut: a part of the numbers, from the matrix's shape and element type alone."""

    block_n: int
    block_k: int
    splits: int
    split_blocks: int
    """Blocks of `block_k` in every split but the last, which may be shorter."""
    tiles: int


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How the product with some number of rows is launched: no part of the numbers."""

    block_rows: int
    row_tiles: int
    spread: bool
    """A program a split, instead of one that walks them."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where spread splits leave their sums. Launches one after the other may share it."""

    partials: torch.Tensor
    """float32"""
    counters: torch.Tensor
    """int32, zeros between launches: the last program of a tile puts its counter back"""


def cut(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Cut:
    """Where the product with `weight [num_outputs, num_inputs]` is cut."""
    block_n, block_k = (64, 32) if dtype == torch.float32 else (128, 64)
    tiles = triton.cdiv(num_outputs, block_n)
    blocks = triton.cdiv(num_inputs, block_k)
    splits = max(1, min(MULTIPROCESSORS // tiles, num_inputs // MIN_SPLIT, MAX_SPLITS))
    split_blocks = triton.cdiv(blocks, splits)
    return Cut(block_n, block_k, triton.cdiv(blocks, split_blocks), split_blocks, tiles)


def launch_shape(rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> LaunchShape:
    """How `rows` rows are launched: in tiles as large as their number fills."""
    plan = cut(num_outputs, num_inputs, dtype)
    block_rows = min(128, max(16, int(triton.next_power_of_2(rows))))
    if dtype == torch.float32:
        # The reference's precision, off the matrix unit: one tile, so that Triton's interpreter has the same bits, too.
        block_rows, warps, stages = 32, 4, 2
    elif block_rows <= 64:
        # A stage is 16 KiB of weights and 2 to 8 KiB of rows. Two programs fit into a multiprocessor's 227 KiB, and
        # 48 to 80 KiB of weights are on their way for each: 4.3 TB/s with 0.8 us of latency ask for 26 KiB.
        warps, stages = 4, {16: 6, 32: 5, 64: 4}[block_rows]
    elif plan.splits == 1 and rows > 1024:
        # One accumulator a thread: 128 x 256, the tile with the fewest reads for its arithmetic.
        block_rows, warps, stages = 256, 8, 3
    else:
        warps, stages = 8, 4
    row_tiles = triton.cdiv(rows, block_rows)
    spread = plan.splits > 1 and plan.tiles * row_tiles < SPREAD_BELOW
    return LaunchShape(block_rows, row_tiles, spread, warps, stages)


# Whether the rows are one, or a multiple of 16, makes no better code: the inner dimension is what lies together. It
# would be three compilations of each launch, of seconds each, while programs wait; and other code is what a row's bits
# must not meet.
@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x_ptr: tl.tensor,  # [rows, num_inputs]
    weight_ptr: tl.tensor,  # [num_outputs, num_inputs]
    bias_ptr: tl.tensor,  # [num_outputs], read when HAS_BIAS
    out_ptr: tl.tensor,  # [rows, num_outputs]
    partial_ptr: tl.tensor,  # [splits, tiles, row tiles, BLOCK_N, BLOCK_ROWS] float32, contiguous; used when SPREAD
    counter_ptr: tl.tensor,  # [tiles, row tiles] int32, zeros; used when SPREAD
    rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_row_stride: tl.tensor,
    weight_row_stride: tl.tensor,
    out_row_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,  # num_inputs is a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    SPREAD: tl.constexpr,
    ROW_GROUP: tl.constexpr,
) -> None:
    tiles = tl.cdiv(num_outputs, BLOCK_N)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    program = tl.program_id(0)
    group = program // (ROW_GROUP * tiles)
    group_rows = tl.minimum(row_tiles - group * ROW_GROUP, ROW_GROUP)
    within = program % (ROW_GROUP * tiles)
    tile = within // group_rows
    row_tile = group * ROW_GROUP + within % group_rows

    outputs = tl.arange(0, BLOCK_N)
    members = tl.arange(0, BLOCK_ROWS)
    lanes = tl.arange(0, BLOCK_K)
    WALKED: tl.constexpr = SPLITS > 1 and not SPREAD  # noqa: N806
    first_output = tile * BLOCK_N
    first_row = row_tile * BLOCK_ROWS
    held_outputs = first_output + outputs < num_outputs
    held_rows = first_row + members < rows
    weight_tile = weight_ptr + first_output.to(tl.int64) * weight_row_stride
    x_tile = x_ptr + first_row.to(tl.int64) * x_row_stride
    weight_offsets = outputs[:, None] * weight_row_stride + lanes[None, :]
    x_offsets = members[:, None] * x_row_stride + lanes[None, :]

    blocks = tl.cdiv(num_inputs, BLOCK_K)
    if SPREAD:
        first_block = tl.program_id(1) * SPLIT_BLOCKS
        last_block = tl.minimum(first_block + SPLIT_BLOCKS, blocks)
    else:
        first_block = 0
        last_block = blocks
    summed = tl.zeros([BLOCK_N, BLOCK_ROWS], tl.float32)
    total = summed
    for block in range(first_block, last_block):
        start = block * BLOCK_K
        if WHOLE_BLOCKS:
            weight = tl.load(weight_tile + start + weight_offsets, mask=held_outputs[:, None], other=0.0)
            x = tl.load(x_tile + start + x_offsets, mask=held_rows[:, None], other=0.0)
        else:
            inside = start + lanes < num_inputs
            weight = tl.load(
                weight_tile + start + weight_offsets, mask=held_outputs[:, None] & inside[None, :], other=0.0
            )
            x = tl.load(x_tile + start + x_offsets, mask=held_rows[:, None] & inside[None, :], other=0.0)
        summed = tl.dot(weight, tl.trans(x), summed, input_precision="ieee")
        if WALKED:  # noqa: SIM102  # known at compile time, and the block's number is not
            if (block + 1) % SPLIT_BLOCKS == 0:
                total += summed
                summed = tl.zeros([BLOCK_N, BLOCK_ROWS], tl.float32)
    if WALKED:
        total += summed
    else:
        total = summed

    out_tile = out_ptr + first_row.to(tl.int64) * out_row_stride + first_output
    out_offsets = members[:, None] * out_row_stride + outputs[None, :]
    held = held_rows[:, None] & held_outputs[None, :]
    bias_tile = bias_ptr + first_output + outputs
    if SPREAD:
        place = tile * row_tiles + row_tile
        partial_stride = tiles * row_tiles * (BLOCK_N * BLOCK_ROWS)
        partial = partial_ptr + place * (BLOCK_N * BLOCK_ROWS) + outputs[:, None] * BLOCK_ROWS + members[None, :]
        tl.store(partial + tl.program_id(1) * partial_stride, total)
        # All of this program's threads have stored before one of them counts it; whoever counts last sees all sums.
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + place, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            total = tl.load(partial, cache_modifier=".cg")
            for split in range(1, SPLITS):
                total += tl.load(partial + split * partial_stride, cache_modifier=".cg")
            _store_rows(out_tile + out_offsets, total, bias_tile, held, held_outputs, HAS_BIAS)
            tl.store(counter_ptr + place, 0)
    else:
        _store_rows(out_tile + out_offsets, total, bias_tile, held, held_outputs, HAS_BIAS)


@triton.jit
def _store_rows(
    out: tl.tensor,  # [BLOCK_ROWS, BLOCK_N] pointers
    total: tl.tensor,  # [BLOCK_N, BLOCK_ROWS] float32
    bias: tl.tensor,  # [BLOCK_N] pointers
    held: tl.tensor,
    held_outputs: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:
    if HAS_BIAS:
        total += tl.load(bias, mask=held_outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(out, tl.trans(total).to(out.dtype.element_ty), mask=held)


def make_scratch(
    max_rows: int, shapes: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device | str
) -> Scratch:
    """Scratch for products of up to `max_rows` rows with matrices of these `(num_outputs, num_inputs)`."""
    partials = counters = 1
    for num_outputs, num_inputs in shapes:
        plan = cut(num_outputs, num_inputs, dtype)
        for rows in _row_counts(max_rows):
            launch = launch_shape(rows, num_outputs, num_inputs, dtype)
            if launch.spread:
                places = plan.tiles * launch.row_tiles
                partials = max(partials, plan.splits * places * plan.block_n * launch.block_rows)
                counters = max(counters, places)
    return Scratch(
        torch.empty(partials, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def _row_counts(max_rows: int) -> Iterable[int]:
    """Numbers of rows that make the largest launch of every kind up to `max_rows`."""
    return {max_rows, *(size for size in (16, 32, 64) if size < max_rows), *range(128, max_rows, 128)}


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """`x [rows, num_inputs] @ weight [num_outputs, num_inputs]^T (+ bias)`, a row's bits the same among any others.

    Without `scratch` it is made for this launch alone. `out` may be of another type than `x`: float32 for logits.
    """
    rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    assert weight.shape[1] == num_inputs, (x.shape, weight.shape)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert x.stride(1) == weight.stride(1) == 1
    assert bias is None or (bias.shape == (num_outputs,) and bias.stride(0) == 1)
    out = torch.empty((rows, num_outputs), dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == (rows, num_outputs), (out.shape, rows, num_outputs)
    assert out.stride(1) == 1

    plan = cut(num_outputs, num_inputs, x.dtype)
    launch = launch_shape(rows, num_outputs, num_inputs, x.dtype)
    if launch.spread:
        if scratch is None:
            scratch = make_scratch(rows, [(num_outputs, num_inputs)], x.dtype, x.device)
        places = plan.tiles * launch.row_tiles
        assert scratch.partials.numel() >= plan.splits * places * plan.block_n * launch.block_rows
        assert scratch.counters.numel() >= places
    _matmul_kernel[(plan.tiles * launch.row_tiles, plan.splits if launch.spread else 1)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        scratch.partials if launch.spread and scratch is not None else out,
        scratch.counters if launch.spread and scratch is not None else out,
        rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        WHOLE_BLOCKS=num_inputs % plan.block_k == 0,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        BLOCK_ROWS=launch.block_rows,
        SPLITS=plan.splits,
        SPLIT_BLOCKS=plan.split_blocks,
        SPREAD=launch.spread,
        ROW_GROUP=ROW_GROUP,
        enable_fp_fusion=True,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out
