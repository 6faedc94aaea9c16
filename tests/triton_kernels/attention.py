"""What the tests of attention share."""

from dataclasses import dataclass

import torch

# float32: sums of a thousand terms in another order. fp16 and bf16: the weights are rounded to the type
# before they meet V, and the result once more.
ABSOLUTE_ERROR = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
