from collections.abc import Iterator
from functools import partial

import torch

from tests.triton_kernels.launches import Launch, meta
from triton_kernels.gated_activation import KINDS, gated_activation


def launches() -> Iterator[Launch]:
    for ffn_size in (1536, 14336):
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            for kind in KINDS:
                gate_up = meta(4, 2 * ffn_size, dtype=dtype)
                yield Launch(
                    f"{ffn_size} {name} {kind}",
                    partial(gated_activation, gate_up, kind),
                    default=ffn_size == 14336 and name == "bf16",
                )
