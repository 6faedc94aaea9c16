"""Launches of the kernels of attention."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from libsym.abi import PAGE_ENTRIES
from tests.triton_kernels.launches import BF16, FP8, FP16, Launch, meta
from triton_kernels.attention_mass import attention_mass
from triton_kernels.paged_decode_attention import layer_pages, paged_decode_attention
from triton_kernels.paged_prefill_attention import paged_prefill_attention
from triton_kernels.shared_prefix_attention import SharedPrefixes, attend_shared_prefixes

Shape = tuple[int, int, int]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# Query heads, KV heads, head_dim: SmolLM2-135M, Llama-3-8B, Qwen2's groups of 7, Gemma 3's and Gemma 2's widest heads.
SHAPES: tuple[Shape, ...] = ((9, 3, 64), (32, 8, 128), (28, 4, 128), (4, 1, 256), (8, 4, 256))
ELEMENTS = {"bf16": BF16, "fp16": FP16, "fp32": torch.float32}
DEFAULT = {"32/8x128 bf16", "4/1x256 bf16"}
BATCH, GROUPS, CHUNKS, ROWS, COLUMNS = 64, 4, 3, 512, 8192


def ints(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [meta(*size, dtype=torch.int32) for size in sizes]


def inputs(shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Inputs:
    """Query, keys, values, page tables and lengths of decodes."""
    pages = meta(4096, 32, 2, shape[1], PAGE_ENTRIES, shape[2], dtype=kv_dtype or dtype)
    tables, lengths = ints((BATCH, 132), (BATCH,))
    return meta(BATCH, *shape[::2], dtype=dtype), *layer_pages(pages, 1, shape[2]), tables, lengths


def prefixes() -> SharedPrefixes:
    return SharedPrefixes(*ints((GROUPS + 1,), (BATCH,), (GROUPS,), (BATCH,)))


def decode(shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, **options) -> None:
    paged_decode_attention(*inputs(shape, dtype, kv_dtype), **options)


def decode_shared(shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, **options) -> None:
    rows = BATCH * shape[0] * 32
    scratch = meta(rows * shape[2], dtype=torch.float32), meta(rows, dtype=torch.float32)
    attend_shared_prefixes(*inputs(shape, dtype, kv_dtype), prefixes(), *scratch, **options)


def prefill(shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, **options) -> None:
    _, keys, values, *_ = inputs(shape, dtype, kv_dtype)
    lists = ints((CHUNKS, 132), (CHUNKS,), (CHUNKS + 1,), (40, 2))
    paged_prefill_attention(meta(ROWS, *shape[::2], dtype=dtype), keys, values, *lists, **masked(options))


def mass(shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, **options) -> None:
    keys = inputs(shape, dtype, kv_dtype)[1]
    lists = ints((CHUNKS, 132), (CHUNKS,), (CHUNKS + 1,), (40, 2), (60, 2), (CHUNKS,))
    levels, out = (meta(*size, dtype=torch.float32) for size in ((ROWS, shape[0]), (shape[1], COLUMNS)))
    attention_mass(meta(ROWS, *shape[::2], dtype=dtype), keys, *lists, levels=levels, out=out, **masked(options))


def masked(options: dict) -> dict:
    if not options.pop("masked", False):
        return options
    return options | dict(
        zip(("masks", "mask_first", "mask_words"), ints((ROWS * 132,), (CHUNKS,), (CHUNKS,)), strict=True)
    )


def of_models() -> Iterator[tuple[str, Shape, torch.dtype, dict]]:
    """Shapes and types of models. float32 is the reference: one shape shows that it compiles."""
    for shape, (element, dtype) in product(SHAPES, ELEMENTS.items()):
        name = "{}/{}x{} {}".format(*shape, element)
        if element != "fp32" or shape == SHAPES[0]:
            yield name, shape, dtype, {"default": name in DEFAULT, "may_spill": element == "fp32"}


def of_variants(run: Callable[..., None], *, masks: bool = False) -> Iterator[Launch]:
    """The same beside float8, with masks, and with windows and softcaps of models."""
    for shape in SHAPES[:4]:
        name = "{}/{}x{} bf16".format(*shape)
        yield Launch(f"{name} over float8", partial(run, shape, BF16, FP8), least_capability=90)
        if masks:
            yield Launch(f"{name} with masks", partial(run, shape, BF16, masked=True))


def of_windows(run: Callable[..., None], windows: tuple[int, ...] = (0, 4096), tail: str = "") -> Iterator[Launch]:
    yield Launch(f"32/8x128 bf16, Mistral's window{tail}", partial(run, (32, 8, 128), BF16, window=4096))
    for window in windows:
        says = f", window {window}" if len(windows) > 1 else ""
        capped = partial(run, (8, 4, 256), BF16, softcap=50.0, window=window)
        yield Launch(f"8/4x256 bf16, Gemma 2's softcap{says}{tail}", capped)
    yield Launch(f"4/1x256 bf16, Gemma 3's window{tail}", partial(run, (4, 1, 256), BF16, window=512))


def spilling_before_90(launches: Iterator[Launch], name: str = "") -> Iterator[Launch]:
    """On an A100, mma.sync has the queries in registers, beside two sums: 16 to 80 bytes of a thread are spilled."""
    for launch in launches:
        yield replace(launch, may_spill_before=90) if name in launch.name else launch


def decodes() -> Iterator[Launch]:
    for name, shape, dtype, about in of_models():
        yield Launch(name, partial(decode, shape, dtype), **about)
    for shape in SHAPES:
        run = partial(decode, shape, BF16, groups=prefixes())
        yield Launch("{}/{}x{} bf16 beside shared prefixes".format(*shape), run, may_spill_before=90)
    yield from of_variants(decode)
    yield from spilling_before_90(of_windows(decode), "Gemma 3's window")


def shared_prefixes() -> Iterator[Launch]:
    for name, shape, dtype, about in of_models():
        before = 90 if shape == (28, 4, 128) else 80
        yield Launch(name, partial(decode_shared, shape, dtype), may_spill_before=before, **about)
    yield from of_variants(decode_shared)
    yield from spilling_before_90(of_windows(decode_shared), "Gemma 3's window")


def prefills() -> Iterator[Launch]:
    for name, shape, dtype, about in of_models():
        yield Launch(name, partial(prefill, shape, dtype), **about)
        fast = partial(prefill, shape, dtype, invariant=False)
        yield Launch(f"{name}, not invariant", fast, **(about | {"default": name == "32/8x128 bf16"}))
    yield from of_variants(prefill, masks=True)
    for invariant in (True, False):
        tail = "" if invariant else ", not invariant"
        yield from of_windows(partial(prefill, invariant=invariant), tail=tail)


def masses() -> Iterator[Launch]:
    for name, shape, dtype, about in of_models():
        yield Launch(name, partial(mass, shape, dtype), **about)
    yield from of_variants(mass, masks=True)
    yield from of_windows(mass, (4096,))


LAUNCHES: dict[str, Callable[[], Iterator[Launch]]] = {
    "attention_mass": masses,
    "paged_decode_attention": decodes,
    "paged_prefill_attention": lambda: spilling_before_90(prefills()),
    "shared_prefix_attention": shared_prefixes,
}
