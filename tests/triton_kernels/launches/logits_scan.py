from collections.abc import Iterator
from functools import partial

import torch

from tests.triton_kernels.launches import Launch, meta
from tests.triton_kernels.launches._logits import DEFAULT, ROWS, VOCAB_SIZES, logits, settings
from triton_kernels.logits_rows import TokenLists, scratch_for
from triton_kernels.logits_scan import scan


def launches() -> Iterator[Launch]:
    for vocab_size in VOCAB_SIZES:
        for changes in (False, True):
            yield Launch(
                f"{vocab_size}{' masks and lists' * changes}",
                partial(launch, vocab_size, changes=changes),
                default=vocab_size == DEFAULT and changes,
            )
    yield Launch("262144 capped", lambda: launch(262144, changes=False, softcap=30.0))


def launch(vocab_size, *, changes, softcap=0.0) -> None:
    numbers, floats = meta(64, dtype=torch.int32), meta(64, dtype=torch.float32)
    scan(
        logits(vocab_size),
        logits(vocab_size),
        settings(),
        scratch_for(ROWS, vocab_size, "meta"),
        lists=TokenLists(meta(ROWS + 1, dtype=torch.int32), numbers, floats, numbers) if changes else None,
        allowed=meta(ROWS, -(-vocab_size // 32), dtype=torch.int32) if changes else None,
        softcap=softcap,
    )
