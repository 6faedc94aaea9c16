from collections.abc import Iterator
from functools import partial

import torch

from libsym.abi import PAGE_ENTRIES
from tests.triton_kernels.launches import Launch, meta
from triton_kernels.paged_decode_attention import layer_pages, paged_decode_attention
from triton_kernels.shared_prefix_attention import SharedPrefixes

# Query heads, KV heads, head_dim: SmolLM2-135M, Llama-3-8B, Qwen2's groups of 7, Gemma 3's and Gemma 2's widest heads.
SHAPES = ((9, 3, 64), (32, 8, 128), (28, 4, 128), (4, 1, 256), (8, 4, 256))
ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT = {"32/8x128 bf16", "4/1x256 bf16"}
BATCH = 64
GROUPS = 4


def attention_inputs(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = meta(4096, 32, 2, num_kv_heads, PAGE_ENTRIES, head_dim, dtype=kv_dtype or dtype)
    tables, lengths = meta(BATCH, 132, dtype=torch.int32), meta(BATCH, dtype=torch.int32)
    return meta(BATCH, num_heads, head_dim, dtype=dtype), *layer_pages(pages, 1, head_dim), tables, lengths


def shared_prefixes() -> SharedPrefixes:
    sizes = (GROUPS + 1, BATCH, GROUPS, BATCH)
    return SharedPrefixes(*(meta(size, dtype=torch.int32) for size in sizes))


def attend(shape: tuple[int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype | None = None, **options) -> None:
    paged_decode_attention(*attention_inputs(*shape, dtype, kv_dtype), **options)


def launches() -> Iterator[Launch]:
    for shape in SHAPES:
        for element, dtype in ELEMENTS.items():
            name = "{}/{}x{} {}".format(*shape, element)
            if element == "fp32" and shape != SHAPES[0]:
                continue  # float32 is the reference: one model's shape shows that it compiles
            yield Launch(name, partial(attend, shape, dtype), default=name in DEFAULT, may_spill=element == "fp32")
        name = "{}/{}x{} bf16 beside shared prefixes".format(*shape)
        run = partial(attend, shape, torch.bfloat16, groups=shared_prefixes())
        yield Launch(name, run, may_spill_before=90)  # as in shared_prefix_attention.py
    float8 = torch.float8_e4m3fn
    for shape in SHAPES[:4]:
        name = "{}/{}x{} bf16 over float8".format(*shape)
        yield Launch(name, partial(attend, shape, torch.bfloat16, float8), least_capability=90)
    windowed = partial(attend, (32, 8, 128), torch.bfloat16, window=4096)
    yield Launch("32/8x128 bf16, Mistral's window", windowed)
    for window in (0, 4096):
        capped = partial(attend, (8, 4, 256), torch.bfloat16, softcap=50.0, window=window)
        yield Launch(f"8/4x256 bf16, Gemma 2's softcap, window {window}", capped)
    windowed = partial(attend, (4, 1, 256), torch.bfloat16, window=512)
    yield Launch("4/1x256 bf16, Gemma 3's window", windowed, may_spill_before=90)
