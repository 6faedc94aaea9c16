from collections.abc import Iterator
from functools import partial

import torch

from tests.triton_kernels.launches import Launch, meta
from triton_kernels.embedding import embed


def launches() -> Iterator[Launch]:
    tokens = meta(4, dtype=torch.int32)
    for hidden_size in (576, 4096):
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            table = meta(1000, hidden_size, dtype=dtype)
            yield Launch(
                f"{hidden_size} {name}",
                partial(embed, tokens, table, 1.0),
                default=hidden_size == 4096 and name == "bf16",
            )
