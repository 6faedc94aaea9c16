"""Tokens from rows of logits: caps, masks, penalties, a draw, and the drawn token's log-probability.

Only tests use these kernels so far. They are kept for a cuda backend that draws on the device. Today the daemon draws
on the host, where `pred` returns whole rows. So a program and `generate` draw the same token. The kernels do not
support typical_p, DRY, mirostat or a window of penalties; such rows always need the host.

The kernels draw like libsym/rows/sampler.c: the same row, settings and uniform number give the same token, unless a sum
is so near an edge that its rounding decides. There are four kernels, and the host does not wait between them:

1. logits_scan.py, by blocks of a row: changes values, and summarises each block;
2. logits_choose.py, by rows: finishes greedy rows; for other rows it finds a lower bound of their candidates;
3. logits_collect.py, by blocks: collects the candidates;
4. logits_draw.py, by rows: sorts the candidates (logits_sort.py), and draws a token from them.

Most rows have tens or hundreds of candidates. If a row is so flat that it has more than `ROOM` candidates, they are not
sorted. Instead, the value of the drawn token is narrowed down (logits_narrow.py). The two ways differ in time, and
their results differ only by rounding.

The order of a row's sums does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton

from triton_kernels.logits_choose import choose
from triton_kernels.logits_collect import collect
from triton_kernels.logits_draw import draw
from triton_kernels.logits_rows import GROUPS, RowSettings, Scratch, TokenLists, num_blocks, scratch_for
from triton_kernels.logits_scan import scan


def process_logits(
    logits: torch.Tensor,
    settings: RowSettings,
    *,
    lists: TokenLists | None = None,
    allowed: torch.Tensor | None = None,
    softcap: float = 0.0,
    scratch: Scratch | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's token, `[rows]` int32, and its log-probability by the unchanged logits, `[rows]` float32.

    `logits [rows, vocab_size]` is float32; with a `softcap`, each logit becomes `softcap * tanh(logit / softcap)`, in
    place. `allowed [rows, ceil(vocab_size / 32)]` is int32, with a bit for each token, beginning with the lowest bit. A
    negative token is an error: `NOT_A_DISTRIBUTION` (NaN or +inf in the logits, or after a penalty) or
    `NOTHING_POSSIBLE`.
    """
    rows, vocab_size = logits.shape
    changes = lists is not None or allowed is not None
    scratch = scratch_for(rows, vocab_size, logits.device, changes=changes) if scratch is None else scratch
    if out is None:
        out = (
            torch.empty(rows, dtype=torch.int32, device=logits.device),
            torch.empty(rows, dtype=torch.float32, device=logits.device),
        )
    tokens, logprobs = out
    values = logits
    if changes:
        assert scratch.changed is not None
        values = scratch.changed
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert scratch.groups.shape[0] >= rows
    assert scratch.groups.shape[1] == num_blocks(vocab_size) * GROUPS, scratch.groups.shape
    assert all(each.shape == (rows,) and each.is_contiguous() for each in _tensors(settings))
    assert settings.uniform.dtype == torch.float64
    assert allowed is None or (allowed.shape == (rows, triton.cdiv(vocab_size, 32)) and allowed.stride(1) == 1)
    assert tokens.shape == logprobs.shape == (rows,)
    scan(logits, values, settings, scratch, lists=lists, allowed=allowed, softcap=softcap)
    choose(logits, settings, scratch, tokens, logprobs)
    collect(values, settings, scratch)
    draw(logits, values, settings, scratch, tokens, logprobs)
    return tokens, logprobs


def _tensors(settings: RowSettings) -> tuple[torch.Tensor, ...]:
    return (
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.repetition,
        settings.presence,
        settings.frequency,
        settings.uniform,
    )
