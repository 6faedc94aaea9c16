from collections.abc import Iterator
from functools import partial

import torch

from libsym.abi import PAGE_ENTRIES
from tests.triton_kernels.launches import Launch, meta
from triton_kernels.rope_store import rope_store

# (query heads, KV heads, head_dim): SmolLM2-135M, Llama-3-8B, Gemma's widest head, a head that is no power of two.
SHAPES = ((9, 3, 64), (32, 8, 128), (8, 4, 256), (32, 8, 80))
STORED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def launches() -> Iterator[Launch]:
    for num_heads, num_kv_heads, head_dim in SHAPES:
        for name, stored in STORED.items():
            dtype = torch.float16 if name == "fp16" else torch.bfloat16
            for norm in (False, True):
                yield Launch(
                    f"{num_heads}/{num_kv_heads}x{head_dim} {name}{' norm' * norm}",
                    partial(launch, num_heads, num_kv_heads, head_dim, dtype, stored, norm=norm),
                    default=name == "bf16" and head_dim in {64, 128} and norm == (head_dim == 128),
                    least_capability=89 if name == "fp8" else 80,
                )


def launch(num_heads, num_kv_heads, head_dim, dtype, stored, *, norm) -> None:
    qkv = meta(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    rows = meta(4, dtype=torch.int32)
    pages = meta(8, 2, 2, num_kv_heads, PAGE_ENTRIES, head_dim, dtype=stored)
    weight = meta(head_dim, dtype=dtype) if norm else None
    table = meta(64, head_dim, dtype=torch.float32)
    rope_store(qkv, table, rows, rows, pages, 1, num_heads, num_kv_heads, q_norm=weight, k_norm=weight, eps=1e-6)
