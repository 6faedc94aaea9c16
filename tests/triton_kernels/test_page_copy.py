"""Pages copied and cleared, bit for bit."""

import pytest
import torch

from triton_kernels.page_copy import copy_pages, zero_pages

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def random_pages(num_frames: int, dtype: torch.dtype, device: str, head_dim: int = 16) -> torch.Tensor:
    """Any bits: a page may hold what is no number."""
    shape = (num_frames, 2, 2, 3, 32, head_dim * dtype.itemsize)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return bits.view(dtype).to(device)


def as_bytes(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(torch.uint8)


def frames(numbers: list[int], device: str) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80])
def test_targets_become_their_sources_or_zeros_and_nothing_else_changes(device, dtype, head_dim):
    pages = random_pages(7, dtype, device, head_dim)
    expected = as_bytes(pages).clone()
    expected[[6, 0, 3]] = expected[[2, 2, 5]]
    copy_pages(pages, frames([2, 2, 2**31 - 1, 5], device), frames([6, 0, -1, 3], device))  # -1 is left out
    assert torch.equal(as_bytes(pages), expected)
    expected[[4, 1]] = 0
    zero_pages(pages, frames([4, -1, 1], device))
    assert torch.equal(as_bytes(pages), expected)


def test_no_pages_are_no_launch(device):
    pages = random_pages(2, torch.bfloat16, device)
    expected = as_bytes(pages).clone()
    copy_pages(pages, frames([], device), frames([], device))
    zero_pages(pages, frames([], device))
    assert torch.equal(as_bytes(pages), expected)
