from collections.abc import Iterator

import torch

from tests.triton_kernels.launches import Launch, meta
from triton_kernels.page_swap import gather_pages, scatter_pages


def launches() -> Iterator[Launch]:
    pages, frames = meta(8, 2, 2, 8, 32, 128, dtype=torch.bfloat16), meta(2, dtype=torch.int32)
    staging = meta(2, 2, 2, 8, 32, 128, dtype=torch.bfloat16)
    yield Launch("gather", lambda: gather_pages(pages, frames, staging), default=True)
    yield Launch("scatter", lambda: scatter_pages(staging, pages, frames))
