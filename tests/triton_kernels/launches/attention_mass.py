from collections.abc import Iterator
from functools import partial

import torch

from tests.triton_kernels.launches import Launch, meta
from tests.triton_kernels.launches.paged_decode_attention import DEFAULT, ELEMENTS, SHAPES, attention_inputs
from tests.triton_kernels.launches.paged_prefill_attention import CHUNKS, ROWS
from triton_kernels.attention_mass import attention_mass

COLUMNS = 8192


def add_up(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    masked: bool = False,
    **options,
) -> None:
    _, keys, _, _, _ = attention_inputs(*shape, dtype, kv_dtype)
    query = meta(ROWS, *shape[::2], dtype=dtype)
    sizes = ((CHUNKS, 132), (CHUNKS,), (CHUNKS + 1,), (40, 2), (60, 2), (CHUNKS,))
    lists = [meta(*size, dtype=torch.int32) for size in sizes]
    if masked:
        masks = (meta(*size, dtype=torch.int32) for size in ((ROWS * 132,), (CHUNKS,), (CHUNKS,)))
        options |= dict(zip(("masks", "mask_first", "mask_words"), masks, strict=True))
    levels, out = (meta(*size, dtype=torch.float32) for size in ((ROWS, shape[0]), (shape[1], COLUMNS)))
    attention_mass(query, keys, *lists, levels=levels, out=out, **options)


def launches() -> Iterator[Launch]:
    for shape in SHAPES:
        for element, dtype in ELEMENTS.items():
            name = "{}/{}x{} {}".format(*shape, element)
            fp32 = element == "fp32"
            if not fp32 or shape == SHAPES[0]:
                yield Launch(name, partial(add_up, shape, dtype), default=name in DEFAULT, may_spill=fp32)
    bf16 = torch.bfloat16
    for shape in SHAPES[:4]:
        name = "{}/{}x{} bf16".format(*shape)
        yield Launch(f"{name} over float8", partial(add_up, shape, bf16, torch.float8_e4m3fn), least_capability=90)
        yield Launch(f"{name} with masks", partial(add_up, shape, bf16, masked=True))
    yield Launch("32/8x128 bf16, Mistral's window", partial(add_up, (32, 8, 128), bf16, window=4096))
    yield Launch("8/4x256 bf16, Gemma 2's softcap", partial(add_up, (8, 4, 256), bf16, softcap=50.0, window=4096))
    yield Launch("4/1x256 bf16, Gemma 3's window", partial(add_up, (4, 1, 256), bf16, window=512))
