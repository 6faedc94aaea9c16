"""Copies and clears whole pages in the arena: for copy-on-write, and for reused frames."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Number of 4-byte words that a program copies. Each thread has 8 loads of 16 bytes in flight."""
NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def _copy_pages_kernel(
    page_ptr: tl.tensor,  # [num_frames, page_words] int32, contiguous
    source_ptr: tl.tensor,  # [n] int32
    target_ptr: tl.tensor,  # [n] int32, -1: nothing to do
    page_words: tl.tensor,
    ZERO: tl.constexpr,  # fill the targets with zeros; the sources are not read
    BLOCK: tl.constexpr,
) -> None:
    target = tl.load(target_ptr + tl.program_id(0)).to(tl.int64)
    if target < 0:
        return
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < page_words
    if ZERO:
        values = tl.zeros([BLOCK], tl.int32)
    else:
        source = tl.load(source_ptr + tl.program_id(0)).to(tl.int64)
        values = tl.load(page_ptr + source * page_words + words, mask=inside)
    tl.store(page_ptr + target * page_words + words, values, mask=inside)


def copy_pages(pages: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy frame `sources[i]` to frame `targets[i]`, bit for bit; skip targets of -1.

    `pages [num_frames, ...]`, `sources` and `targets` `[n]` int32. No frame may be both a source and a target.
    """
    _launch(pages, sources, targets, zero=False)


def zero_pages(pages: torch.Tensor, targets: torch.Tensor) -> None:
    """Fill the frames `targets [n]` (int32, -1: none) with zeros."""
    _launch(pages, targets, targets, zero=True)


def _launch(pages: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, *, zero: bool) -> None:
    assert pages.is_contiguous()
    words = pages.view(pages.shape[0], -1).view(torch.int32)  # [num_frames, words]: the same memory
    assert sources.shape == targets.shape == (targets.numel(),), (sources.shape, targets.shape)
    assert sources.dtype == targets.dtype == torch.int32
    assert sources.is_contiguous()
    assert targets.is_contiguous()
    if targets.numel() == 0:
        return
    _copy_pages_kernel[(targets.numel(), triton.cdiv(words.shape[1], BLOCK))](
        words, sources, targets, words.shape[1], ZERO=zero, BLOCK=BLOCK, enable_fp_fusion=True, num_warps=NUM_WARPS
    )
