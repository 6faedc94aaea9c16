"""What the device's memory is used for, decided before anything is put there.

Weights and the step's own memory are arithmetic on the model's shape; what is left becomes frames of KV.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from decoder.checkpoints.llama import tensor_shapes
from decoder.model_config import GPU_KV_DTYPE, GPU_PRECISIONS, ModelConfig
from libsym.abi import PAGE_ENTRIES
from libsym.errors import NoSpace

PRECISIONS = dict(zip(GPU_PRECISIONS, (torch.float32, torch.bfloat16, torch.float16), strict=True))
"""Of the arithmetic, and of weights and activations in memory."""

MAX_ROWS = 4096
"""Tokens of one pass; a batch of more is computed in several. Enough that products are bound by arithmetic."""
MAX_DECODES = 256
"""Decodes of one pass: the largest that a graph is captured for."""
MAX_SPLITS = 16384
"""Splits (of 8 pages) that the tables of one pass's decodes cover: 256 decodes of 16,384 entries, 64 of 65,536."""
LOGIT_ROWS = 256
"""Rows of logits that are on the device at a time."""

MIN_FRAMES = 64
"""Fewer frames than pages that one assembly needs (33), or that a file of 2,048 entries has, are of no use."""
FREE_SHARE = 0.9
"""Of the memory that is free when the daemon starts: CUDA and the graphs need some that nobody can name."""
GRAPH_BYTES = 256 << 20
"""Set aside for captured graphs: some MB each, and there are some dozens."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of the device."""

    weight_bytes: int
    workspace_bytes: int
    page_bytes: int
    num_frames: int


def choose_dtypes(precision: str, kv_dtype: str | None) -> tuple[torch.dtype, str]:
    """The element types of arithmetic and KV that these options mean."""
    return PRECISIONS[precision], GPU_KV_DTYPE[precision if kv_dtype is None else kv_dtype]


def plan_memory(
    config: ModelConfig, dtype: torch.dtype, kv_dtype: str, free_bytes: int, gpu_memory: int | None = None
) -> MemoryPlan:
    """Divide `gpu_memory` (None: most of what is free); NoSpace, with the figures, if the model does not fit."""
    if gpu_memory is not None and gpu_memory > free_bytes:
        raise NoSpace(f"--gpu-memory is {_gb(gpu_memory)}, {_gb(free_bytes)} of the GPU's memory are free: say less")
    available = int(free_bytes * FREE_SHARE) if gpu_memory is None else gpu_memory
    weight_bytes = dtype.itemsize * sum(math.prod(shape) for _, shape in tensor_shapes(config))
    workspace_bytes = _workspace_bytes(config, dtype)
    page_bytes = PAGE_ENTRIES * config.entry_bytes(kv_dtype)
    num_frames = (available - weight_bytes - workspace_bytes) // page_bytes
    if num_frames < MIN_FRAMES:
        advice = "free memory" if gpu_memory is None else "say a larger --gpu-memory"
        raise NoSpace(
            f"{config.name} does not fit the GPU: {_gb(weight_bytes)} of weights, {_gb(workspace_bytes)} to compute "
            f"in, at least {_gb(MIN_FRAMES * page_bytes)} of KV; {_gb(max(available, 0))} may be used: choose a "
            f"smaller model, or {advice}"
        )
    return MemoryPlan(weight_bytes, workspace_bytes, page_bytes, num_frames)


def _workspace_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What a step of the largest size has on the device at a time, at most."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    hidden, ffn, vocab = config.hidden_size, config.ffn_size, config.vocab_size
    # The residual stream twice in float32; normed rows; Q, K, V and what attention gives; gate, up and their product.
    row = 8 * hidden + dtype.itemsize * (2 * hidden + (3 * heads + 2 * kv_heads) * dim + 3 * ffn)
    attention = (MAX_SPLITS + MAX_ROWS) * heads * (dim + 1) * 4
    rope_tables = (1 + bool(config.local_rope_theta)) * config.max_positions * dim * 4
    return MAX_ROWS * row + attention + rope_tables + LOGIT_ROWS * vocab * 4 + GRAPH_BYTES


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
