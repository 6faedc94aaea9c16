"""Arguments that the launches of the drawing kernels share."""

import torch

from tests.triton_kernels.launches import meta
from triton_kernels.logits_rows import RowSettings

ROWS = 4
VOCAB_SIZES = (49152, 128256, 151936, 262144)
DEFAULT = 128256


def logits(vocab_size: int) -> torch.Tensor:
    return meta(ROWS, vocab_size, dtype=torch.float32)


def results() -> tuple[torch.Tensor, torch.Tensor]:
    return meta(ROWS, dtype=torch.int32), meta(ROWS, dtype=torch.float32)


def settings() -> RowSettings:
    return RowSettings(
        *(
            meta(ROWS, dtype={"top_k": torch.int32, "uniform": torch.float64}.get(name, torch.float32))
            for name in RowSettings.__slots__
        )
    )
