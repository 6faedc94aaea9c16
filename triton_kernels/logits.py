"""From rows of logits to tokens: caps, masks, penalties, a draw, and what the drawn token's log-probability was.

Only tests use this yet. It is kept for the day when the cuda backend draws on the device; until then the daemon draws
on the host, where `pred` hands out whole rows, so that a program and `generate` draw the same token. Rows of a
sampler with typical_p, DRY, mirostat or a window of penalties are the host's in any case: nothing here has these.

The rule is that of libsym/sampler.c: the same row, settings and uniform number give the same token, unless a sum lies
so near an edge that its rounding decides. Four kernels, and the host learns nothing in between:

1. logits_scan.py, by blocks of a row: values are changed, and each block says what it holds;
2. logits_choose.py, by rows: greedy rows are done; the others get a value that all of their candidates reach;
3. logits_collect.py, by blocks: the candidates;
4. logits_draw.py, by rows: a token from the candidates, sorted (logits_sort.py).

Candidates are tens or hundreds in most rows. Where they are more than `ROOM` (so flat a row that its nucleus is), they
are not sorted: the value is narrowed down (logits_narrow.py). Which way it goes changes the time, and the result only
as rounding does.

A row's sums are made the same way whatever else is in the batch.
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
    """Each row's token, `[rows]` int32, and its log-probability under the model's own distribution, `[rows]` float32.

    `logits [rows, vocab_size]` float32; with a `softcap`, each becomes `softcap * tanh(logit / softcap)`, in place.
    `allowed [rows, ceil(vocab_size / 32)]` int32: a bit for each token, the lowest first. A token below 0 says that
    there is none: `NOT_A_DISTRIBUTION` (NaN or +inf among the logits, or by a penalty) or `NOTHING_POSSIBLE`.
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
