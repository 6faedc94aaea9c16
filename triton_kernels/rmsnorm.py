"""RMSNorm, alone or fused with the residual addition before it (and, for Gemma, with the norm before the addition).

The residual may have a wider type than the tensor added to it. A float32 residual beside bfloat16 costs a step almost
nothing, because a step reads mostly weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_HIDDEN_SIZE = 16384
"""Length of the longest row that a program can hold in registers: 16,384 float32 values are 128 for each thread at 4
warps.
"""


@triton.jit
def _rmsnorm_kernel(
    x_ptr: tl.tensor,  # [rows, hidden_size]
    residual_ptr: tl.tensor,  # [rows, hidden_size], read when ADD_RESIDUAL
    post_weight_ptr: tl.tensor,  # [hidden_size], read when POST_NORM
    weight_ptr: tl.tensor,  # [hidden_size]
    out_ptr: tl.tensor,  # [rows, hidden_size], contiguous
    new_residual_ptr: tl.tensor,  # [rows, hidden_size], contiguous, written when ADD_RESIDUAL
    x_row_stride: tl.tensor,
    residual_row_stride: tl.tensor,
    hidden_size: tl.tensor,
    eps: tl.tensor,
    ADD_RESIDUAL: tl.constexpr,
    POST_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    # All loads come before the first sum, because a single row is bound by latency.
    wide = tl.load(x_ptr + row * x_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    if ADD_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_row_stride + columns, mask=inside, other=0.0)
    if POST_NORM:
        post_weight = tl.load(post_weight_ptr + columns, mask=inside, other=0.0)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden_size + eps) * post_weight.to(tl.float32)
    if ADD_RESIDUAL:
        # Round to the stored type before the norm, so that fused and separate kernels give the same bits.
        new_residual = (wide + residual.to(tl.float32)).to(residual.dtype)
        tl.store(new_residual_ptr + row * hidden_size + columns, new_residual, mask=inside)
        wide = new_residual.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden_size + eps) * weight.to(tl.float32)
    tl.store(out_ptr + row * hidden_size + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x / rms(x) * weight` over the last axis of `x [rows, hidden_size]`, in float32 and rounded once."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, x, None, weight, eps, out, out, add_residual=False)
    return out


def add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    post_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(rmsnorm(x + residual), x + residual)`, in one pass over `[rows, hidden_size]`.

    With a `post_weight`, `rmsnorm(x, post_weight)` replaces `x` in the addition. `new_residual` has the residual's
    type, and may be `residual` itself: each row is read before it is written.
    """
    assert residual.shape == x.shape, (residual.shape, x.shape)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    new_residual = torch.empty(x.shape, dtype=residual.dtype, device=x.device) if new_residual is None else new_residual
    assert new_residual.dtype == residual.dtype, (new_residual.dtype, residual.dtype)
    _launch(x, residual, post_weight, weight, eps, out, new_residual, add_residual=True)
    return out, new_residual


def block_size(hidden_size: int) -> int:
    """Return the number of lanes that a program uses for a row: a power of two, as Triton requires."""
    assert 0 < hidden_size <= MAX_HIDDEN_SIZE, hidden_size
    return int(triton.next_power_of_2(hidden_size))


def num_warps(hidden_size: int) -> int:
    """Return the number of warps for one row, from 1 to 16: a thread has about 16 values."""
    return min(16, max(1, block_size(hidden_size) // 512))


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_weight: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    new_residual: torch.Tensor,
    *,
    add_residual: bool,
) -> None:
    rows, hidden_size = x.shape
    assert x.stride(1) == residual.stride(1) == weight.stride(0) == 1
    assert weight.shape == (hidden_size,), weight.shape
    assert out.shape == new_residual.shape == x.shape
    assert post_weight is None or post_weight.shape == (hidden_size,)
    assert out.is_contiguous()
    assert new_residual.is_contiguous()
    _rmsnorm_kernel[(rows,)](
        x,
        residual,
        weight if post_weight is None else post_weight,
        weight,
        out,
        new_residual,
        x.stride(0),
        residual.stride(0),
        hidden_size,
        eps,
        ADD_RESIDUAL=add_residual,
        POST_NORM=post_weight is not None,
        BLOCK=block_size(hidden_size),
        enable_fp_fusion=True,
        num_warps=num_warps(hidden_size),
    )
