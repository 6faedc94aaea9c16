"""Pages gathered into a staging area and scattered from it, for swaps on a stream of their own.

A few programs walk over all the words, so that a swap leaves the multiprocessors to the step that runs beside it: the
link to the host is the limit, and it needs few requests on their way to be full. The staging area may be pinned host
memory, which a GPU addresses as its own. (Pages of megabytes, one after the other, are as well served by the copy
engines; small ones and many are not, for each would be a call.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_kernels.page_copy import page_words

BLOCK = 4096
"""Words of 4 bytes that a program moves at a time: 16 KiB on their way."""
NUM_WARPS = 4
NUM_PROGRAMS = 16
"""256 KiB on their way fill a link of 64 GB/s at 4 microseconds a request, and take a few of 132 multiprocessors."""


@triton.jit(do_not_specialize=["num_pages"], do_not_specialize_on_alignment=["frame_ptr"])
def _swap_kernel(
    page_ptr: tl.tensor,  # [num_frames, page_words] int32, contiguous
    frame_ptr: tl.tensor,  # [num_pages] int32, -1: nothing to do
    staging_ptr: tl.tensor,  # [num_pages, page_words] int32, contiguous
    num_pages: tl.tensor,
    page_words: tl.tensor,
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    blocks_per_page = tl.cdiv(page_words, BLOCK)
    for block in range(tl.program_id(0), num_pages * blocks_per_page, tl.num_programs(0)):
        index = block // blocks_per_page
        frame = tl.load(frame_ptr + index).to(tl.int64)
        words = block % blocks_per_page * BLOCK + tl.arange(0, BLOCK)
        inside = words < page_words
        in_pages = page_ptr + frame * page_words + words
        in_staging = staging_ptr + index.to(tl.int64) * page_words + words
        if frame >= 0:
            if SCATTER:
                tl.store(in_pages, tl.load(in_staging, mask=inside), mask=inside)
            else:
                tl.store(in_staging, tl.load(in_pages, mask=inside), mask=inside)


def gather_pages(pages: torch.Tensor, frames: torch.Tensor, staging: torch.Tensor) -> None:
    """`staging[i]` becomes frame `frames[i]`, bit for bit; where that is -1, it stays as it is.

    `pages [num_frames, ...]`, `frames [n]` int32 on the device, `staging [n, ...]`: n pages of the same size, in device
    memory or in pinned host memory.
    """
    _launch(pages, frames, staging, scatter=False)


def scatter_pages(staging: torch.Tensor, pages: torch.Tensor, frames: torch.Tensor) -> None:
    """Frame `frames[i]` becomes `staging[i]`: the way back of `gather_pages`."""
    _launch(pages, frames, staging, scatter=True)


def _launch(pages: torch.Tensor, frames: torch.Tensor, staging: torch.Tensor, *, scatter: bool) -> None:
    words, staged = page_words(pages), page_words(staging)
    assert staged.shape == (frames.numel(), words.shape[1]), (staged.shape, words.shape)
    assert frames.dtype == torch.int32, frames.dtype
    assert frames.is_contiguous()
    if frames.numel() == 0:
        return
    _swap_kernel[(min(NUM_PROGRAMS, frames.numel() * triton.cdiv(words.shape[1], BLOCK)),)](
        words,
        frames,
        staged,
        frames.numel(),
        words.shape[1],
        SCATTER=scatter,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
        num_warps=NUM_WARPS,
    )
