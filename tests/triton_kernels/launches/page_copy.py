from collections.abc import Iterator

import torch

from tests.triton_kernels.launches import Launch, meta
from triton_kernels.page_copy import copy_pages, zero_pages


def launches() -> Iterator[Launch]:
    pages, frames = meta(8, 2, 2, 8, 32, 128, dtype=torch.bfloat16), meta(2, dtype=torch.int32)
    yield Launch("copy", lambda: copy_pages(pages, frames, frames), default=True)
    yield Launch("zero", lambda: zero_pages(pages, frames))
