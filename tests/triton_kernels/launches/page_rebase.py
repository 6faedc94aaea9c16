from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from tests.triton_kernels.launches import Launch, meta
from triton_kernels.page_rebase import assemble_pages

STORED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def launches() -> Iterator[Launch]:
    for kv_heads, head_dim in ((3, 64), (8, 128), (4, 256), (8, 80)):
        for name, dtype in STORED.items():
            yield Launch(
                f"{kv_heads}x{head_dim} {name}",
                partial(launch, kv_heads, head_dim, dtype),
                default=name == "bf16" and head_dim == 128,
                least_capability=89 if name == "fp8" else 80,
            )


def launch(kv_heads, head_dim, dtype) -> None:
    pages, lists = meta(8, 2, 2, kv_heads, 32, head_dim, dtype=dtype), np.zeros((1, 32), np.int32)
    frequencies = [np.ones(head_dim // 2)]
    assemble_pages(pages, lists[:, 0], lists, lists, lists, lists[:, 0], frequencies, [0, 0])
