"""Pages gathered for a swap and scattered back, bit for bit."""

import pytest
import torch

from tests.triton_kernels.test_page_copy import TYPES, as_bytes, frames, random_pages
from triton_kernels.page_swap import gather_pages, scatter_pages


def staging_for(pages: torch.Tensor, count: int, *, pinned: bool) -> torch.Tensor:
    staging = torch.zeros((count, *pages.shape[1:]), dtype=pages.dtype, device="cpu" if pinned else pages.device)
    return staging.pin_memory() if pinned and pages.is_cuda else staging


@pytest.mark.parametrize("pinned", [False, True], ids=["device memory", "pinned host memory"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80])
def test_pages_come_back_as_they_went_into_other_frames(device, head_dim, dtype, pinned):
    pages = random_pages(9, dtype, device, head_dim)
    before = as_bytes(pages).clone()
    staging = staging_for(pages, 3, pinned=pinned)
    gather_pages(pages, frames([7, 0, 4], device), staging)
    if pages.is_cuda:
        torch.cuda.synchronize()
    assert torch.equal(as_bytes(staging).to(device), before[[7, 0, 4]])
    scatter_pages(staging, pages, frames([1, 7, 8], device))
    before[[1, 7, 8]] = before[[7, 0, 4]]
    assert torch.equal(as_bytes(pages), before)


def test_more_blocks_than_programs_are_all_moved(device):
    pages = random_pages(19, torch.float32, device)
    staging = staging_for(pages, 19, pinned=False)
    gather_pages(pages, frames(list(range(18, -1, -1)), device), staging)
    assert torch.equal(as_bytes(staging), as_bytes(pages).flip(0))


def test_a_frame_of_minus_one_is_left_out_both_ways(device):
    pages = random_pages(4, torch.bfloat16, device)
    before = as_bytes(pages).clone()
    staging = staging_for(pages, 2, pinned=False)
    gather_pages(pages, frames([-1, 2], device), staging)
    assert torch.equal(as_bytes(staging[0]), torch.zeros_like(as_bytes(staging[0])))
    scatter_pages(staging, pages, frames([0, -1], device))
    before[0] = 0
    assert torch.equal(as_bytes(pages), before)
