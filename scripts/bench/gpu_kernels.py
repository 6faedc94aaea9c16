"""Measurements of single kernels: the speed of attention and of products, the error of fp8 KV, and whether bits are
equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu_clock import Ceilings, Clock

from libsym.abi import PAGE_ENTRIES
from triton_kernels.attention_launch import wide_shape
from triton_kernels.matmul import make_scratch, matmul
from triton_kernels.paged_decode_attention import Scratch, layer_pages, paged_decode_attention
from triton_kernels.paged_prefill_attention import paged_prefill_attention, prefill_tiles
from triton_kernels.shared_prefix_attention import SharedPrefixes, find_groups


@dataclass(frozen=True, slots=True)
class Heads:
    queries: int
    kv: int
    dim: int

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of K and V of one entry in one layer."""
        return 2 * self.kv * self.dim * dtype.itemsize


class Attention:
    """Attention of one shape over several layers of random entries."""

    def __init__(self, clock: Clock, heads: Heads, num_frames: int, layers: int, dtype: torch.dtype) -> None:
        self.clock, self.heads, self.dtype, self.layers = clock, heads, dtype, layers
        self.pages = torch.empty(
            (num_frames, layers, 2, heads.kv, PAGE_ENTRIES * heads.dim), dtype=dtype, device=clock.device
        )
        for first in range(0, num_frames, 1024):
            self.pages[first : first + 1024].normal_()
        self.order = np.random.default_rng(1).permutation(num_frames).astype(np.int32)

    def on_device(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(self.clock.device)

    def queries(self, rows: int) -> torch.Tensor:
        shape = (self.layers, rows, self.heads.queries, self.heads.dim)
        return torch.randn(shape, device=self.clock.device).to(self.dtype)

    def decode(
        self,
        page_tables: np.ndarray,
        lengths: np.ndarray,
        *,
        shared: bool = False,
        pages: torch.Tensor | None = None,
        queries: torch.Tensor | None = None,
    ) -> Any:
        """Return a function that computes the attention of one row for each table in a given layer."""
        pages = self.pages if pages is None else pages
        batch, width = page_tables.shape
        queries = self.queries(batch) if queries is None else queries
        out = torch.empty_like(queries[0])
        scratch = Scratch.allocate(batch, self.heads.queries, self.heads.dim, width, self.clock.device)
        tables, rows = self.on_device(page_tables), self.on_device(lengths)
        groups = None
        if shared:
            found = [self.on_device(each) for each in find_groups(page_tables, lengths.astype(np.int32))]
            groups = SharedPrefixes(*found)
        layers = [layer_pages(pages, layer, self.heads.dim) for layer in range(self.layers)]

        def run(layer: int) -> torch.Tensor:
            keys, values = layers[layer]
            return paged_decode_attention(
                queries[layer], keys, values, tables, rows, groups=groups, scratch=scratch, out=out
            )

        return run


def decode_attention(
    clock: Clock, ceilings: Ceilings, attention: Attention, batch: int, context: int
) -> dict[str, float]:
    """Measure decode attention of rows with separate contexts."""
    pages = -(-context // PAGE_ENTRIES)
    tables = attention.order[: batch * pages].reshape(batch, pages)
    run = attention.decode(tables, np.full(batch, context, np.int32))
    times = clock.device_times(run, sets=attention.layers)
    num_bytes = batch * context * attention.heads.entry_bytes(attention.dtype)
    rate = num_bytes / times.median
    return times.figures() | {"gb_per_s": rate / 1e9, "of_copy": rate / ceilings.copy_bytes_per_s}


def shared_prefix(clock: Clock, attention: Attention, branches: int, prefix: int, suffix: int) -> dict[str, float]:
    """Measure decode attention of rows that begin with the same pages.

    The peers are the kernel without groups of shared prefixes, and rows that share no pages.
    """
    prefix_pages, own_pages = prefix // PAGE_ENTRIES, -(-suffix // PAGE_ENTRIES)
    own = attention.order[prefix_pages : prefix_pages + branches * own_pages].reshape(branches, own_pages)
    common = np.tile(attention.order[:prefix_pages], (branches, 1))
    tables, lengths = np.hstack((common, own)), np.full(branches, prefix + suffix, np.int32)
    queries = attention.queries(branches)
    with_groups = attention.decode(tables, lengths, shared=True, queries=queries)
    without = attention.decode(tables, lengths, queries=queries)
    same = bool(torch.equal(with_groups(0).clone(), without(0)))
    shared_times = clock.device_times(with_groups, sets=attention.layers)
    plain_times = clock.device_times(without, sets=attention.layers)
    found = shared_times.figures() | {
        "unshared_us": 1e6 * plain_times.median,
        "speedup": plain_times.median / shared_times.median,
        "same_bits": float(same),
    }
    total = prefix_pages + own_pages
    if branches * total <= len(attention.order):
        apart = attention.order[: branches * total].reshape(branches, total)
        apart_times = clock.device_times(attention.decode(apart, lengths, queries=queries), sets=attention.layers)
        found["speedup_over_own_copies"] = apart_times.median / shared_times.median
    return found


def prefill_attention(
    clock: Clock, ceilings: Ceilings, attention: Attention, rows: int, prefix: int, *, invariant: bool
) -> dict[str, float]:
    """Measure the attention of one prefill chunk after a prefix. The number of operations counts only the entries that
    a row attends to.
    """
    heads = attention.heads
    num_pages = -(-(prefix + rows) // PAGE_ENTRIES)
    shape = wide_shape(heads.queries, heads.kv, heads.dim, attention.dtype, attention.dtype)
    tables = attention.on_device(attention.order[None, :num_pages])
    starts, first_rows = attention.on_device([prefix]), attention.on_device([0, rows])
    tiles = attention.on_device(prefill_tiles(np.array([rows], np.int32), shape))
    queries = attention.queries(rows)
    out = torch.empty_like(queries[0])
    layers = [layer_pages(attention.pages, layer, heads.dim) for layer in range(attention.layers)]

    def run(layer: int) -> object:
        keys, values = layers[layer]
        return paged_prefill_attention(
            queries[layer], keys, values, tables, starts, first_rows, tiles, invariant=invariant, out=out
        )

    times = clock.device_times(run, sets=attention.layers, runs=30)
    seen = rows * prefix + rows * (rows + 1) // 2
    rate = 4 * heads.queries * heads.dim * seen / times.median
    return times.figures() | {"tflop_per_s": rate / 1e12, "of_products": rate / ceilings.products_flop_per_s}


def fp8_attention(clock: Clock, ceilings: Ceilings, attention: Attention, batch: int, context: int) -> dict[str, float]:
    """Measure decode attention with KV in float8_e4m3fn: its time, and its error against KV in the queries' type."""
    pages = -(-context // PAGE_ENTRIES)
    tables, lengths = attention.order[: batch * pages].reshape(batch, pages), np.full(batch, context, np.int32)
    narrow = attention.pages.to(torch.float8_e4m3fn)
    queries = attention.queries(batch)
    wide_run = attention.decode(tables, lengths, queries=queries)
    narrow_run = attention.decode(tables, lengths, queries=queries, pages=narrow)
    expected, found = wide_run(0).double(), narrow_run(0).double()
    times = clock.device_times(narrow_run, sets=attention.layers)
    rate = batch * context * attention.heads.entry_bytes(torch.float8_e4m3fn) / times.median
    return times.figures() | {
        "gb_per_s": rate / 1e9,
        "of_copy": rate / ceilings.copy_bytes_per_s,
        "relative_error": float((found - expected).norm() / expected.norm()),
    }


def product(
    clock: Clock, ceilings: Ceilings, rows: int, shape: tuple[int, int], dtype: torch.dtype, sets: int
) -> dict[str, float]:
    """Measure a product with sums in a fixed order beside the library's product.

    The calls use several matrices in turn, since one matrix would stay in the cache.
    """
    num_outputs, num_inputs = shape
    scratch = make_scratch(rows, [shape], dtype, clock.device)
    weights = [torch.randn(shape, device=clock.device).to(dtype) for _ in range(sets)]
    x = torch.randn(rows, num_inputs, device=clock.device).to(dtype)
    out = torch.empty(rows, num_outputs, dtype=dtype, device=clock.device)
    ours = clock.device_times(lambda index: matmul(x, weights[index], out=out, scratch=scratch), sets=sets, runs=30)
    library = clock.device_times(lambda index: torch.mm(x, weights[index].t(), out=out), sets=sets, runs=30)
    num_bytes = (num_outputs * num_inputs + rows * (num_inputs + num_outputs)) * dtype.itemsize
    return ours.figures() | {
        "library_us": 1e6 * library.median,
        "of_library": library.median / ours.median,
        "of_copy": num_bytes / ours.median / ceilings.copy_bytes_per_s,
        "of_products": 2 * rows * num_outputs * num_inputs / ours.median / ceilings.products_flop_per_s,
    }


def product_bits(device: torch.device, shape: tuple[int, int], dtype: torch.dtype, most_rows: int) -> dict[str, float]:
    """Return whether a row of a product has the same bits beside any number of other rows, for our product and the
    library's.

    The error is the difference between our product and float64.
    """
    _, num_inputs = shape
    weight = torch.randn(shape, device=device).to(dtype)
    x = torch.randn(most_rows, num_inputs, device=device).to(dtype)
    together, library = matmul(x, weight), torch.mm(x, weight.t())
    counts = [count for count in (1, 2, 16, 17, 32, 33, 64, 65, 128, 300, 1024, 1025, 2048) if count < most_rows]
    same = [bool(torch.equal(matmul(x[:count], weight), together[:count])) for count in counts]
    library_same = [bool(torch.equal(torch.mm(x[:count], weight.t()), library[:count])) for count in counts]
    exact = x[:64].double() @ weight.double().t()
    return {
        "row_counts": len(counts),
        "same_bits": float(all(same)),
        "library_same_bits": float(all(library_same)),
        "relative_error": float((together[:64].double() - exact).norm() / exact.norm()),
    }
