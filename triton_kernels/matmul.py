"""Product of rows with a weight matrix. A row's bits do not depend on the number of rows.

Each element of the result is the same chain of additions in every launch. The inner dimension is cut into splits, which
depend only on the matrix's shape. One chain of matrix instructions sums a split from zero, from its first block to its
last. The float32 sums of the splits are added in order. Then the bias is added, and the result is rounded once. A
library, in contrast, chooses its kernel, and with it the order of additions, by the number of rows.

The weights are the left operand and the rows the right operand (`out^T = weight @ x^T`). So 128 weight rows fill
Hopper's widest matrix instruction for any batch, and few rows are padded to 16, not to 64. The number of rows changes
the columns of an instruction, but never the additions to one element.

For few rows the product is bound by reading the weights, and a small matrix has too few tiles for all multiprocessors.
So each split gets its own program, and the last program of a tile adds up all splits, in order. For many rows there are
enough tiles, so one program walks the splits of its tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MULTIPROCESSORS = 132
"""Number of multiprocessors for which a matrix is cut. An H100 or H200 has this number. The constant is the same on
every GPU, because another cut gives other bits.
"""
MIN_SPLIT = 512
"""Number of inputs of the shortest split: 8 blocks, so that filling and draining the pipeline takes a small part of the
time.
"""
MAX_SPLITS = 8
SPREAD_BELOW = 100
"""If a product has fewer tiles than this number, each split gets its own program. Partial sums stay under 26 MB at
Llama-3-8B's shape.
"""
ROW_GROUP = 8
"""Number of row tiles whose programs run side by side and read the same weights, so that rows and weights stay in the
L2 cache.
"""


@dataclass(frozen=True, slots=True)
class MatrixCut:
    """Cut of a matrix, which decides the bits of results, and depends only on the matrix's shape and element type."""

    block_n: int
    block_k: int
    splits: int
    split_blocks: int
    """Number of blocks of `block_k` inputs in every split except the last, which may be shorter."""
    tiles: int


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Launch of the product for a given number of rows. The launch does not change the bits of results."""

    block_rows: int
    row_tiles: int
    spread: bool
    """Whether each split has its own program, instead of one program for all splits of a tile."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for the sums of spread splits. Consecutive launches may share it."""

    partials: torch.Tensor
    """float32"""
    counters: torch.Tensor
    """int32, zeros between launches: the last program of a tile resets the tile's counter"""


def cut(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> MatrixCut:
    """Return the cut of the product with `weight [num_outputs, num_inputs]`."""
    block_n, block_k = (64, 32) if dtype == torch.float32 else (128, 64)
    tiles = triton.cdiv(num_outputs, block_n)
    blocks = triton.cdiv(num_inputs, block_k)
    splits = max(1, min(MULTIPROCESSORS // tiles, num_inputs // MIN_SPLIT, MAX_SPLITS))
    split_blocks = triton.cdiv(blocks, splits)
    return MatrixCut(block_n, block_k, triton.cdiv(blocks, split_blocks), split_blocks, tiles)


def launch_shape(rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> LaunchShape:
    """Return the launch for `rows` rows, with the largest tiles that the rows fill."""
    plan = cut(num_outputs, num_inputs, dtype)
    block_rows = min(128, max(16, int(triton.next_power_of_2(rows))))
    if dtype == torch.float32:
        # float32 products do not use the matrix unit. With one tile size, Triton's interpreter has the same bits too.
        block_rows, warps, stages = 32, 4, 2
    elif block_rows <= 64:
        # A stage has 16 KiB of weights and 2 to 8 KiB of rows. Two programs fit into a multiprocessor's 227 KiB, and
        # each has 48 to 80 KiB of weights in flight. With 0.8 us of latency, 4.3 TB/s need 26 KiB.
        warps, stages = 4, {16: 6, 32: 5, 64: 4}[block_rows]
    elif plan.splits == 1 and rows > 1024:
        # One accumulator, of 128 x 256: the tile with the fewest reads for its arithmetic.
        block_rows, warps, stages = 256, 8, 3
    else:
        warps, stages = 8, 4
    row_tiles = triton.cdiv(rows, block_rows)
    spread = plan.splits > 1 and plan.tiles * row_tiles < SPREAD_BELOW
    return LaunchShape(block_rows, row_tiles, spread, warps, stages)


# Specialising on a row count of one, or on multiples of 16, would give no better code: the inner dimension is the
# contiguous one. Each launch would need three compilations, which take seconds while programs wait. And different code
# could give a row different bits.
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
        if WALKED:  # noqa: SIM102  # WALKED is known at compile time, the block's number is not
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
        # All threads of a program have stored their sums before the program counts itself. So the last program sees all
        # sums.
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
    """Return scratch memory for products of up to `max_rows` rows with matrices of `(num_outputs, num_inputs)`."""
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
    """Return row counts up to `max_rows`, among them the largest count for each kind of launch."""
    return {max_rows, *(size for size in (16, 32, 64) if size < max_rows), *range(128, max_rows, 128)}


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Return `x [rows, num_inputs] @ weight [num_outputs, num_inputs]^T (+ bias)`.

    A row's bits do not depend on the other rows. Without `scratch`, the launch allocates its own. `out` may have
    another type than `x`: float32 for logits.
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
