from collections.abc import Iterator
from functools import partial

import torch

from tests.triton_kernels.launches import Launch, meta
from tests.triton_kernels.launches.paged_decode_attention import (
    BATCH,
    DEFAULT,
    ELEMENTS,
    SHAPES,
    attention_inputs,
    shared_prefixes,
)
from triton_kernels.shared_prefix_attention import attend_shared_prefixes


def attend(shape: tuple[int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype | None = None, **options) -> None:
    rows = BATCH * shape[0] * 32
    scratch = meta(rows * shape[2], dtype=torch.float32), meta(rows, dtype=torch.float32)
    attend_shared_prefixes(*attention_inputs(*shape, dtype, kv_dtype), shared_prefixes(), *scratch, **options)


def launches() -> Iterator[Launch]:
    for shape in SHAPES:
        for element, dtype in ELEMENTS.items():
            name = "{}/{}x{} {}".format(*shape, element)
            if element == "fp32" and shape != SHAPES[0]:
                continue
            # On an A100, whose mma.sync has the queries in registers, groups of 7 spill 80 bytes a thread.
            before = 90 if shape == (28, 4, 128) else 80
            run = partial(attend, shape, dtype)
            yield Launch(name, run, default=name in DEFAULT, may_spill=element == "fp32", may_spill_before=before)
    for shape in SHAPES[:4]:
        name = "{}/{}x{} bf16 over float8".format(*shape)
        yield Launch(name, partial(attend, shape, torch.bfloat16, torch.float8_e4m3fn), least_capability=90)
    yield Launch("32/8x128 bf16, Mistral's window", partial(attend, (32, 8, 128), torch.bfloat16, window=4096))
    for window in (0, 4096):
        capped = partial(attend, (8, 4, 256), torch.bfloat16, softcap=50.0, window=window)
        yield Launch(f"8/4x256 bf16, Gemma 2's softcap, window {window}", capped)
    windowed = partial(attend, (4, 1, 256), torch.bfloat16, window=512)
    yield Launch("4/1x256 bf16, Gemma 3's window", windowed, may_spill_before=90)
