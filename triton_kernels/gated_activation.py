"""Gated activation of the MLP: the product of the activated gate and the up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Number of elements of a program. A thread loads 8 elements of the gate and 8 of the up projection, 16 bytes each in
half precision.
"""
NUM_WARPS = 4

KINDS = ("silu", "gelu_tanh")


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    small = tl.exp(-tl.abs(x))  # the argument is never positive, so this cannot overflow
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr: tl.tensor,  # [rows, 2, ffn_size]: gates, then the up projection
    out_ptr: tl.tensor,  # [rows, ffn_size], contiguous
    gate_up_row_stride: tl.tensor,
    ffn_size: tl.tensor,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < ffn_size
    gates = gate_up_ptr + row * gate_up_row_stride + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + ffn_size, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(z)) / 2 is sigmoid(2 z). The constant is 2 sqrt(2 / pi).
        activated = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * _sigmoid(gate)
    tl.store(out_ptr + row * ffn_size + columns, (activated * up).to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation(gate_up: torch.Tensor, kind: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `activation(gate) * up`, `[rows, ffn_size]`, for `gate_up [rows, 2 * ffn_size]`: the gate, then `up`.

    `kind` is `silu` or `gelu_tanh`. The result is computed in float32 and rounded once.
    """
    rows, both = gate_up.shape
    ffn_size = both // 2
    out = torch.empty((rows, ffn_size), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    assert kind in KINDS, kind
    assert both == 2 * ffn_size, both
    assert gate_up.stride(1) == 1
    assert out.shape == (rows, ffn_size), out.shape
    assert out.is_contiguous()
    _gated_activation_kernel[(rows, triton.cdiv(ffn_size, BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        ffn_size,
        GELU=kind == "gelu_tanh",
        BLOCK=BLOCK,
        enable_fp_fusion=True,
        num_warps=NUM_WARPS,
    )
    return out
