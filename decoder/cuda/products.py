"""Products with the weights: by a kernel that adds in a fixed order, or by cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.cuda.device_weights import DeviceWeights
from decoder.cuda.memory_plan import MAX_ROWS
from triton_kernels.matmul import make_scratch, matmul


class Products:
    """`x @ weight.T + bias`, for any number of rows."""

    def __init__(self, weights: DeviceWeights, dtype: torch.dtype, device: torch.device, *, invariant: bool) -> None:
        self._invariant = invariant
        self._scratch = make_scratch(MAX_ROWS, sorted(weights.matrix_shapes()), dtype, device) if invariant else None

    def of(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return the product, in `out` if the caller gives it. `out` may be float32 if the type of `x` is narrower."""
        if self._invariant:
            return matmul(x, weight, bias=bias, out=out, scratch=self._scratch)
        if out is None:
            return torch.nn.functional.linear(x, weight, bias)
        assert bias is None
        if out.dtype == x.dtype:
            return torch.mm(x, weight.t(), out=out)
        if x.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
        return torch.mm(x.to(out.dtype), weight.t().to(out.dtype), out=out)
