"""How often each kernel is compiled for batches of other numbers: `{"matmul": 1, ...}` as JSON.

A compilation takes seconds, and while a daemon serves, programs wait for it. Triton compiles anew when a number
becomes 1, or a multiple of 16, unless it is told to look at none of this.

Needs a process without TRITON_INTERPRET, as compile_ahead.py does, whose driver this has.
"""

import json

import torch
import triton
from triton.runtime.jit import JITFunction

from libsym.abi import PAGE_ENTRIES
from tests.triton_kernels.compile_ahead import AbsentGpu
from tests.triton_kernels.launches import meta
from triton_kernels.matmul import matmul
from triton_kernels.paged_decode_attention import layer_pages, paged_decode_attention
from triton_kernels.paged_prefill_attention import paged_prefill_attention
from triton_kernels.shared_prefix_attention import SharedPrefixes

HEADS, KV_HEADS, DIM = 9, 3, 64


def ints(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def launch_all() -> None:
    for rows in (1, 2, 16):
        matmul(meta(rows, 576), meta(576, 576))
    pages = meta(512, 2, 2, KV_HEADS, PAGE_ENTRIES, DIM)
    keys, values = layer_pages(pages, 1, DIM)
    for batch, width in ((1, 8), (1, 64), (2, 64), (16, 64), (32, 128)):
        groups = SharedPrefixes(ints(batch + 1), ints(batch), ints(batch), ints(batch))
        paged_decode_attention(meta(batch, HEADS, DIM), keys, values, ints(batch, width), ints(batch), groups=groups)
    for rows, chunks, width in ((1, 1, 1), (33, 2, 5), (64, 16, 16)):
        lists = ints(chunks, width), ints(chunks), ints(chunks + 1), ints(4, 2)
        paged_prefill_attention(meta(rows, HEADS, DIM), keys, values, *lists)


def main() -> None:
    triton.runtime.driver.set_active(AbsentGpu(90))
    compiled: dict[str, set[int]] = {}
    plain_run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        del warmup
        kernel = plain_run(self, *args, grid=grid, warmup=True, **options)
        compiled.setdefault(self.__name__.strip("_").removesuffix("_kernel"), set()).add(id(kernel))
        return kernel

    JITFunction.run = compile_only
    launch_all()
    print(json.dumps({name: len(kernels) for name, kernels in compiled.items()}))


if __name__ == "__main__":
    main()
