from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from tests.triton_kernels.launches import Launch, meta
from tests.triton_kernels.launches.paged_decode_attention import DEFAULT, ELEMENTS, SHAPES, attention_inputs
from triton_kernels.paged_prefill_attention import paged_prefill_attention

CHUNKS = 3
ROWS = 512


def attend(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    masked: bool = False,
    **options,
) -> None:
    _, keys, values, _, _ = attention_inputs(*shape, dtype, kv_dtype)
    query = meta(ROWS, *shape[::2], dtype=dtype)
    lists = [meta(*size, dtype=torch.int32) for size in ((CHUNKS, 132), (CHUNKS,), (CHUNKS + 1,), (40, 2))]
    if masked:
        masks = (meta(*size, dtype=torch.int32) for size in ((ROWS * 132,), (CHUNKS,), (CHUNKS,)))
        options |= dict(zip(("masks", "mask_first", "mask_words"), masks, strict=True))
    paged_prefill_attention(query, keys, values, *lists, **options)


def launches() -> Iterator[Launch]:
    for launch in _launches():
        # An A100 spills 16 to 80 bytes a thread: mma.sync has the queries in registers, beside two sums.
        yield replace(launch, may_spill_before=90)


def _launches() -> Iterator[Launch]:
    for shape in SHAPES:
        for element, dtype in ELEMENTS.items():
            name = "{}/{}x{} {}".format(*shape, element)
            fp32 = element == "fp32"
            if fp32 and shape != SHAPES[0]:
                continue
            yield Launch(name, partial(attend, shape, dtype), default=name in DEFAULT, may_spill=fp32)
            fast = partial(attend, shape, dtype, invariant=False)
            yield Launch(f"{name}, not invariant", fast, default=name == "32/8x128 bf16", may_spill=fp32)
    bf16 = torch.bfloat16
    for shape in SHAPES[:4]:
        name = "{}/{}x{} bf16".format(*shape)
        yield Launch(f"{name} over float8", partial(attend, shape, bf16, torch.float8_e4m3fn), least_capability=90)
        yield Launch(f"{name} with masks", partial(attend, shape, bf16, masked=True))
    for invariant in (True, False):
        tail = "" if invariant else ", not invariant"
        windowed = partial(attend, (32, 8, 128), bf16, window=4096, invariant=invariant)
        yield Launch(f"32/8x128 bf16, Mistral's window{tail}", windowed)
        for window in (0, 4096):
            capped = partial(attend, (8, 4, 256), bf16, softcap=50.0, window=window, invariant=invariant)
            yield Launch(f"8/4x256 bf16, Gemma 2's softcap, window {window}{tail}", capped)
        windowed = partial(attend, (4, 1, 256), bf16, window=512, invariant=invariant)
        yield Launch(f"4/1x256 bf16, Gemma 3's window{tail}", windowed)
