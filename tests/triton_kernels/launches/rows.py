"""Launches of the kernels of rows and of pages."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np
import torch

from libsym.abi import PAGE_ENTRIES
from tests.triton_kernels.launches import BF16, FP8, FP16, Launch, meta
from triton_kernels.embedding import embed
from triton_kernels.gated_activation import KINDS, gated_activation
from triton_kernels.logits_choose import choose
from triton_kernels.logits_collect import collect
from triton_kernels.logits_draw import draw
from triton_kernels.logits_rows import RowSettings, TokenLists, scratch_for
from triton_kernels.logits_scan import scan
from triton_kernels.matmul import matmul
from triton_kernels.page_copy import copy_pages, zero_pages
from triton_kernels.page_rebase import assemble_pages
from triton_kernels.rmsnorm import add_rmsnorm, rmsnorm
from triton_kernels.rope_store import rope_store

ROWS = 4
HALVES = {"bf16": BF16, "fp16": FP16}
STORED = HALVES | {"fp8": FP8}


def floats(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float32)


def ints(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def embeddings() -> Iterator[Launch]:
    for hidden_size, (name, dtype) in product((576, 4096), HALVES.items()):
        run = partial(embed, ints(ROWS), meta(1000, hidden_size, dtype=dtype), 1.0)
        yield Launch(f"{hidden_size} {name}", run, default=hidden_size == 4096 and name == "bf16")


def activations() -> Iterator[Launch]:
    for ffn_size, (name, dtype), kind in product((1536, 14336), HALVES.items(), KINDS):
        run = partial(gated_activation, meta(ROWS, 2 * ffn_size, dtype=dtype), kind)
        yield Launch(f"{ffn_size} {name} {kind}", run, default=ffn_size == 14336 and name == "bf16")


def norms() -> Iterator[Launch]:
    for hidden_size, (name, dtype) in product((576, 2048, 4096, 8192, 16384), HALVES.items()):
        x, weight = meta(ROWS, hidden_size, dtype=dtype), meta(hidden_size, dtype=dtype)
        wide, is_default = floats(ROWS, hidden_size), name == "bf16" and hidden_size == 16384
        add, what = partial(add_rmsnorm, x, weight=weight, eps=1e-5), f"{hidden_size} {name}"
        yield Launch(what, partial(rmsnorm, x, weight, 1e-5))
        yield Launch(f"{what} residual", partial(add, residual=x), default=is_default)
        yield Launch(f"{what} wide residual", partial(add, residual=wide))
        yield Launch(f"{what} post norm, wide residual", partial(add, residual=wide, post_weight=weight))


# (num_outputs, num_inputs) of qkv, o, gate and up, down, head: Llama-3-8B, SmolLM2-135M.
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
SMOLLM2 = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
PRODUCTS = {"bf16": (BF16, LLAMA + SMOLLM2), "fp16": (FP16, LLAMA), "fp32": (torch.float32, SMOLLM2[2:4])}
NUM_ROWS = (1, 16, 17, 33, 64, 100, 300, 2048)
DEFAULT_PRODUCTS = {"4096x4096 rows 16 bf16", "4096x4096 rows 64 bf16", "28672x4096 rows 2048 bf16"}


def multiply(rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, *, bias: bool = False) -> None:
    weight = meta(num_outputs, num_inputs, dtype=dtype)
    out = floats(rows, num_outputs) if num_outputs > 40000 else None
    matmul(meta(rows, num_inputs, dtype=dtype), weight, bias=meta(num_outputs, dtype=dtype) if bias else None, out=out)


def products() -> Iterator[Launch]:
    for element, (dtype, shapes) in PRODUCTS.items():
        for shape, rows in product(shapes, NUM_ROWS):
            name = f"{shape[0]}x{shape[1]} rows {rows} {element}"
            run, may_spill = partial(multiply, rows, *shape, dtype), element == "fp32" or rows > 1024
            yield Launch(name, run, default=name in DEFAULT_PRODUCTS, may_spill=may_spill)
    for rows in NUM_ROWS:  # Qwen2's products have a bias
        yield Launch(f"4608x3584 rows {rows} bf16 bias", partial(multiply, rows, 4608, 3584, BF16, bias=True))


def copies() -> Iterator[Launch]:
    pages, frames = meta(8, 2, 2, 8, PAGE_ENTRIES, 128), ints(2)
    yield Launch("copy", lambda: copy_pages(pages, frames, frames), default=True)
    yield Launch("zero", lambda: zero_pages(pages, frames))


def rebase(kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    pages, lists = meta(8, 2, 2, kv_heads, PAGE_ENTRIES, head_dim, dtype=dtype), np.zeros((1, PAGE_ENTRIES), np.int32)
    assemble_pages(pages, lists[:, 0], lists, lists, lists, lists[:, 0], [np.ones(head_dim // 2)], [0, 0])


def rebases() -> Iterator[Launch]:
    for (kv_heads, head_dim), (name, dtype) in product(((3, 64), (8, 128), (4, 256), (8, 80)), STORED.items()):
        is_default, least = name == "bf16" and head_dim == 128, 89 if name == "fp8" else 80
        run = partial(rebase, kv_heads, head_dim, dtype)
        yield Launch(f"{kv_heads}x{head_dim} {name}", run, default=is_default, least_capability=least)


def store(num_heads: int, num_kv_heads: int, head_dim: int, stored: torch.dtype, *, norm: bool) -> None:
    dtype = FP16 if stored == FP16 else BF16
    qkv, rows = meta(ROWS, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype), ints(ROWS)
    pages = meta(8, 2, 2, num_kv_heads, PAGE_ENTRIES, head_dim, dtype=stored)
    weight, heads = meta(head_dim, dtype=dtype) if norm else None, (num_heads, num_kv_heads)
    rope_store(qkv, floats(64, head_dim), rows, rows, pages, 1, *heads, q_norm=weight, k_norm=weight, eps=1e-6)


def stores() -> Iterator[Launch]:
    # SmolLM2-135M, Llama-3-8B, Gemma's widest head, a head that is no power of two.
    shapes = ((9, 3, 64), (32, 8, 128), (8, 4, 256), (32, 8, 80))
    for shape, (name, stored), norm in product(shapes, STORED.items(), (False, True)):
        yield Launch(
            "{}/{}x{} {}{}".format(*shape, name, " norm" * norm),
            partial(store, *shape, stored, norm=norm),
            default=name == "bf16" and shape[2] in {64, 128} and norm == (shape[2] == 128),
            least_capability=89 if name == "fp8" else 80,
        )


VOCAB_SIZES, DEFAULT_SIZE = (49152, 128256, 151936, 262144), 128256


def settings() -> RowSettings:
    kinds = {"top_k": torch.int32, "uniform": torch.float64}
    return RowSettings(*(meta(ROWS, dtype=kinds.get(name, torch.float32)) for name in RowSettings.__slots__))


def of_logits(run: Callable[[int], object]) -> Iterator[Launch]:
    for size in VOCAB_SIZES:
        yield Launch(str(size), partial(run, size), default=size == DEFAULT_SIZE)


def chosen(size: int) -> None:
    choose(floats(ROWS, size), settings(), scratch_for(ROWS, size, "meta"), ints(ROWS), floats(ROWS))


def collected(size: int) -> None:
    collect(floats(ROWS, size), settings(), scratch_for(ROWS, size, "meta"))


def drawn(size: int) -> None:
    draw(floats(ROWS, size), floats(ROWS, size), settings(), scratch_for(ROWS, size, "meta"), ints(ROWS), floats(ROWS))


def scanned(size: int, *, changes: bool, softcap: float = 0.0) -> None:
    lists = TokenLists(ints(ROWS + 1), ints(64), floats(64), ints(64)) if changes else None
    allowed = ints(ROWS, -(-size // 32)) if changes else None
    rows, scratch = (floats(ROWS, size), floats(ROWS, size)), scratch_for(ROWS, size, "meta")
    scan(*rows, settings(), scratch, lists=lists, allowed=allowed, softcap=softcap)


def scans() -> Iterator[Launch]:
    for size, changes in product(VOCAB_SIZES, (False, True)):
        name, is_default = f"{size}{' masks and lists' * changes}", size == DEFAULT_SIZE and changes
        yield Launch(name, partial(scanned, size, changes=changes), default=is_default)
    yield Launch("262144 capped", partial(scanned, 262144, changes=False, softcap=30.0))


LAUNCHES: dict[str, Callable[[], Iterator[Launch]]] = {
    "embedding": embeddings,
    "gated_activation": activations,
    "logits_choose": partial(of_logits, chosen),
    "logits_collect": partial(of_logits, collected),
    "logits_draw": partial(of_logits, drawn),
    "logits_scan": scans,
    "matmul": products,
    "page_copy": copies,
    "page_rebase": rebases,
    "rmsnorm": norms,
    "rope_store": stores,
}
