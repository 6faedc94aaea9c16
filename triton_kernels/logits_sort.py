"""A draw from candidates: sorts the candidates, cuts them by top_k and top_p, and draws one of them."""

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels.logits_weights import exponentials


@triton.jit
def _bits_along(AXIS: tl.constexpr, LOG2: tl.constexpr) -> tl.tensor:
    return tl.reshape(tl.arange(0, 2), [1] * AXIS + [2] + [1] * (LOG2 - 1 - AXIS))


@triton.jit
def _exchanged(cube: tl.tensor, descends: tl.tensor, AXIS: tl.constexpr, LOG2: tl.constexpr) -> tl.tensor:
    """Order each pair of neighbours along an axis, ascending or descending."""
    partner = tl.sum(cube, axis=AXIS, keep_dims=True) - cube
    takes_larger = (descends ^ _bits_along(AXIS, LOG2)) != 0
    return tl.where((cube < partner) == takes_larger, partner, cube)


@triton.jit
def _ascending(keys: tl.tensor, LOG2: tl.constexpr) -> tl.tensor:
    """Return `keys [2 ** LOG2]` int64, sorted by a bitonic network.

    `tl.sort` finds an entry's partner by an exclusive or, which would take seconds in Triton's interpreter. This
    network finds the partner by a sum, which may wrap around.
    """
    cube = tl.reshape(keys, [2] * LOG2)
    for stage in tl.static_range(1, LOG2):
        for step in tl.static_range(stage):
            cube = _exchanged(cube, _bits_along(LOG2 - 1 - stage, LOG2), LOG2 - stage + step, LOG2)
    for step in tl.static_range(LOG2):
        cube = _exchanged(cube, 0, step, LOG2)
    return tl.reshape(cube, [2**LOG2])


@triton.jit
def draw_sorted(
    candidate_ptr: tl.tensor,  # [ROOM] int64
    num_candidates: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    total: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    lightest: tl.tensor,
    uniform: tl.tensor,
    ROOM: tl.constexpr,
    LOG2_ROOM: tl.constexpr,
) -> tl.tensor:
    """Sort candidates by their logits, and draw a token. `top_p` is a fraction of the mass of the `top_k` likeliest
    candidates or, if `top_k` is 0, of `total`.
    """
    ranks = tl.arange(0, ROOM)
    keys = tl.load(candidate_ptr + ranks, mask=ranks < num_candidates, other=0x7FFFFFFFFFFFFFFF)
    keys = _ascending(keys, LOG2_ROOM)
    order = -1 - (keys >> 32).to(tl.int32)
    values = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
    is_kept = ranks < tl.where(top_k > 0, tl.minimum(top_k, num_candidates), num_candidates)
    values = tl.where(is_kept, values, float("-inf"))
    weights = tl.where(is_kept, exponentials(values, highest, factor), 0.0)
    wide = weights.to(tl.float64)
    ends = tl.cumsum(wide, axis=0)
    if top_p < 1.0:
        target = top_p.to(tl.float64) * tl.where(top_k > 0, tl.sum(wide, axis=0), total)
        is_kept = is_kept & ((ends - wide < target) | (ranks == 0))
    is_kept = is_kept & (weights >= lightest)
    kept = tl.sum(is_kept.to(tl.int32), axis=0)  # the kept entries have the first ranks
    target = uniform * tl.sum(tl.where(is_kept, wide, 0.0), axis=0)
    rank = tl.minimum(tl.sum((is_kept & (ends <= target)).to(tl.int32), axis=0), kept - 1)
    return tl.sum(tl.where(ranks == rank, keys & 0xFFFFFFFF, 0), axis=0).to(tl.int32)
