"""The launches that the decoder makes: `LAUNCHES` of each module has them by kernel file.

Each is a call of a launch function on tensors without memory, which `compile_ahead.py` compiles.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of a launch function as the decoder would make it, on `meta` tensors."""

    name: str
    """The model's shape and element type, and whatever else decides what is compiled: unique in its file."""
    run: Callable[[], object]
    default: bool = False
    """Compiled in the test suite, and not by `scripts/compile_kernels` alone."""
    may_spill: bool = False
    """No part of the decode path on a GPU: float32 as a reference, say."""
    may_spill_before: int = 80
    """GPUs before it may spill: what it takes was fitted to later ones."""
    least_capability: int = 80
    """GPUs before it have not got what it takes: float8 needs 89."""


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
