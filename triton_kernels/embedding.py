"""Embedding: gathers the rows of the embedding table for a step's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Number of elements of a program: 8 for each thread, which are 16 bytes in half precision."""
NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["token_ptr"])
def _embed_kernel(
    token_ptr: tl.tensor,  # [rows] int32
    table_ptr: tl.tensor,  # [vocab_size, hidden_size], contiguous
    out_ptr: tl.tensor,  # [rows, hidden_size], contiguous
    scale: tl.tensor,
    hidden_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden_size
    out = out_ptr + row * hidden_size + columns
    token = tl.load(token_ptr + row).to(tl.int64)
    if token < 0:
        tl.store(out, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=inside)
    else:
        values = tl.load(table_ptr + token * hidden_size + columns, mask=inside, other=0.0)
        tl.store(out, (values.to(tl.float32) * scale).to(out_ptr.dtype.element_ty), mask=inside)


def embed(
    tokens: torch.Tensor, table: torch.Tensor, scale: float = 1.0, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `table[tokens] * scale`, rounded once: `tokens [rows]` int32, `table [vocab_size, hidden_size]`.

    A token of -1 is padding and gives zeros. `out` may have a wider type than the table, such as a float32 residual.
    """
    (rows,) = tokens.shape
    hidden_size = table.shape[1]
    out = torch.empty((rows, hidden_size), dtype=table.dtype, device=table.device) if out is None else out
    assert tokens.dtype == torch.int32, tokens.dtype
    assert tokens.is_contiguous()
    assert table.is_contiguous()
    assert out.shape == (rows, hidden_size), out.shape
    assert out.is_contiguous()
    _embed_kernel[(rows, triton.cdiv(hidden_size, BLOCK))](
        tokens, table, out, float(scale), hidden_size, BLOCK=BLOCK, enable_fp_fusion=True, num_warps=NUM_WARPS
    )
    return out
