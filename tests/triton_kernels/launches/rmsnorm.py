from collections.abc import Iterator
from functools import partial

import torch

from tests.triton_kernels.launches import Launch, meta
from triton_kernels.rmsnorm import add_rmsnorm, rmsnorm

HIDDEN_SIZES = (576, 2048, 4096, 8192, 16384)


def launches() -> Iterator[Launch]:
    for hidden_size in HIDDEN_SIZES:
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            x, weight = meta(4, hidden_size, dtype=dtype), meta(hidden_size, dtype=dtype)
            yield Launch(f"{hidden_size} {name}", partial(rmsnorm, x, weight, 1e-5))
            yield Launch(
                f"{hidden_size} {name} residual",
                partial(add_rmsnorm, x, x, weight, 1e-5),
                default=name == "bf16" and hidden_size == 16384,
            )
            wide = meta(4, hidden_size, dtype=torch.float32)
            yield Launch(
                f"{hidden_size} {name} wide residual",
                partial(add_rmsnorm, x, wide, weight, 1e-5),
            )
            yield Launch(
                f"{hidden_size} {name} post norm, wide residual",
                partial(add_rmsnorm, x, wide, weight, 1e-5, post_weight=weight),
            )
