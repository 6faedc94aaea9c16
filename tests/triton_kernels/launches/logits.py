from collections.abc import Iterator

import torch

from tests.triton_kernels.launches import Launch, meta
from triton_kernels.logits import RowSettings, TokenLists, process_logits

ROWS = 4


def launches() -> Iterator[Launch]:
    for vocab_size in (49152, 128256, 151936, 262144):
        for changes in (False, True):
            yield Launch(
                f"{vocab_size}{' masks and lists' * changes}",
                lambda vocab_size=vocab_size, changes=changes: launch(vocab_size, changes=changes),
                default=vocab_size == 128256 and changes,
            )
    yield Launch("262144 capped", lambda: launch(262144, changes=False, softcap=30.0))


def launch(vocab_size, *, changes, softcap=0.0) -> None:
    settings = RowSettings(
        *(
            meta(ROWS, dtype={"top_k": torch.int32, "uniform": torch.float64}.get(name, torch.float32))
            for name in RowSettings.__slots__
        )
    )
    numbers, floats = meta(64, dtype=torch.int32), meta(64, dtype=torch.float32)
    process_logits(
        meta(ROWS, vocab_size, dtype=torch.float32),
        settings,
        lists=TokenLists(meta(ROWS + 1, dtype=torch.int32), numbers, floats, numbers) if changes else None,
        allowed=meta(ROWS, -(-vocab_size // 32), dtype=torch.int32) if changes else None,
        softcap=softcap,
    )
