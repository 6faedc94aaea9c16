"""Shared parts of the three attention kernels' launches: shapes, arguments, and the scale of scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton

from libsym.abi import PAGE_ENTRIES
from triton_kernels.attention_splits import SPLIT_PAGES, SPLIT_STEPS, STEP_ENTRIES, TOTAL_LANES

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Compile-time numbers of a launch. They depend on the model's shape and element types, never on the batch."""

    group: int
    """Number of query heads of one KV head. These heads are rows of one matrix product, so K and V are read once for
    all of them.
    """
    tile_rows: int
    """Number of rows of the matrix product, including padding."""
    head_dim: int
    head_lanes: int
    """`head_dim`, padded to a power of two."""
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    """Number of programs that fit into one Hopper multiprocessor, by registers and shared memory. With three stages at
    head_dim 128, two programs of `narrow_shape` have 128 KB in flight. With a microsecond of latency, 33 KB in each of
    132 multiprocessors suffice for 4.3 TB/s.
    """

    @property
    def tile_tokens(self) -> int:
        """Return the number of tokens in one tile, each with `group` heads."""
        return self.tile_rows // self.group

    def num_programs(self, num_items: int, device: torch.device) -> int:
        """Return the number of programs that share a work list. In the interpreter, few programs loop over the list."""
        multiprocessors = 3
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        return min(num_items, self.programs_per_multiprocessor * multiprocessors)

    def constants(self, *, softcap: float, window: int) -> dict[str, int | bool]:
        """Return the compile-time arguments that all three kernels share."""
        return {
            "GROUP": self.group,
            "TILE_ROWS": self.tile_rows,
            "HEAD_DIM": self.head_dim,
            "HEAD_LANES": self.head_lanes,
            "PAGE": PAGE_ENTRIES,
            "STEP": STEP_ENTRIES,
            "SPLIT_STEPS": SPLIT_STEPS,
            "TOTAL_LANES": TOTAL_LANES,
            "SOFTCAP": softcap > 0.0,
            "WINDOWED": window > 0,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def narrow_shape(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> LaunchShape:
    """Return the shape for the query heads of one token. The shape has the fewest rows that the matrix instruction
    allows.
    """
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert 16 <= head_dim <= 256, head_dim
    assert head_dim % 16 == 0, head_dim
    group = num_heads // num_kv_heads
    half = dtype != torch.float32
    head_lanes = int(triton.next_power_of_2(head_dim))
    step_bytes = 2 * STEP_ENTRIES * head_lanes * (kv_dtype or dtype).itemsize
    return LaunchShape(
        group=group,
        tile_rows=max(64 if half else 16, int(triton.next_power_of_2(group))),
        head_dim=head_dim,
        head_lanes=head_lanes,
        # With 4 warps, 256 lanes take 128 registers a thread, and prefill holds two such accumulators.
        num_warps=8 if half and head_lanes > 128 else 4,
        num_stages=3 if step_bytes <= 32 << 10 else 2 if step_bytes <= 64 << 10 else 1,
        programs_per_multiprocessor=3 if head_lanes <= 64 else 2 if head_lanes <= 128 else 1,
    )


def wide_shape(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> LaunchShape:
    """Return the shape for the query heads of many tokens: twice the rows and warps, if registers allow it."""
    shape = narrow_shape(num_heads, num_kv_heads, head_dim, dtype, kv_dtype)
    wide = dtype != torch.float32 and shape.head_lanes <= 128
    tile_rows, num_warps = (max(shape.tile_rows, 128), 8) if wide else (shape.tile_rows, shape.num_warps)
    return replace(shape, tile_rows=tile_rows, num_warps=num_warps, programs_per_multiprocessor=1)


def num_splits(table_pages: int) -> int:
    """Return the maximum number of splits for a page table of this width."""
    return max(1, -(-table_pages // SPLIT_PAGES))


def list_lanes(length: int) -> int:
    """Return the number of lanes for a work list. The number is a power of two, because each distinct number needs a
    compilation.
    """
    return max(32, int(triton.next_power_of_2(length)))


def check_paged(
    query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, page_tables: torch.Tensor
) -> None:
    """Check shapes, strides and types of an attention kernel's tensors.

    The tensors are `query [rows, num_heads, head_dim]`, and `key_pages` and `value_pages` as `[num_pages, kv_heads, 32,
    head_dim]`.
    """
    assert key_pages.shape[2:] == (PAGE_ENTRIES, query.shape[2]), (key_pages.shape, query.shape)
    assert value_pages.shape == key_pages.shape
    assert value_pages.stride() == key_pages.stride()
    assert key_pages.dtype == value_pages.dtype
    assert key_pages.dtype in {query.dtype, torch.float8_e4m3fn}, (key_pages.dtype, query.dtype)
    assert query.stride(2) == key_pages.stride(3) == page_tables.stride(1) == 1


def output_for(query: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Check the caller's output tensor and return it. None: return a new tensor."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    assert out.shape == query.shape
    assert out.is_contiguous()
    return out


def numbers(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    page_tables: torch.Tensor,
    *,
    scale: float | None,
    softcap: float,
    window: int,
) -> tuple[float, ...]:
    """Return the arguments that all three kernels share, from `score_scale` to the stride of the page tables."""
    scale = query.shape[2] ** -0.5 if scale is None else scale
    assert scale > 0.0, scale
    assert softcap >= 0.0, softcap
    scales = (2.0 * _LOG2_E * scale / softcap, _LOG2_E * softcap) if softcap else (0.0, _LOG2_E * scale)
    return (*scales, window, *query.stride()[:2], *key_pages.stride()[:3], page_tables.stride(0))
