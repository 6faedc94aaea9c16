"""The plan of the device's memory, made before any allocation.

The model's shape determines the bytes of the weights and of a step's workspace. The rest becomes frames of KV.
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
"""Type of the arithmetic, and of weights and activations in memory, by precision."""

MAX_ROWS = 4096
"""Maximum number of tokens in a pass. Arithmetic bounds products of this size. Larger batches take several passes."""
MAX_DECODES = 256
"""Maximum number of decodes in one pass, and the largest number of rows in a captured graph."""
MAX_SPLITS = 16384
"""Maximum number of splits (of 8 pages) in tables of a pass's decodes: 256 decodes of 16,384 entries, 64 of 65,536."""
LOGIT_ROWS = 256
"""Maximum number of rows of logits that are on the device at a time."""

MIN_FRAMES = 64
"""Least number of frames: one assembly needs 33 pages, and a file of 2,048 entries has 64."""
FREE_SHARE = 0.9
"""Part of the free memory that the plan takes by default. CUDA and the graphs need an unknown part of the rest."""
GRAPH_BYTES = 256 << 20
"""Bytes reserved for captured graphs: some dozens of graphs, of some MB each."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of the device's memory, in bytes."""

    weight_bytes: int
    workspace_bytes: int
    page_bytes: int
    num_frames: int


def choose_dtypes(precision: str, kv_dtype: str | None) -> tuple[torch.dtype, str]:
    """Return the element types of arithmetic and of KV for these options."""
    return PRECISIONS[precision], GPU_KV_DTYPE[precision if kv_dtype is None else kv_dtype]


def plan_memory(
    config: ModelConfig, dtype: torch.dtype, kv_dtype: str, free_bytes: int, gpu_memory: int | None = None
) -> MemoryPlan:
    """Divide `gpu_memory` (None: most of the free memory). NoSpace: the model does not fit; the error has the sizes."""
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
    """Return the most bytes that a step of the largest size needs on the device at a time, beside weights and KV."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    hidden, ffn, vocab = config.hidden_size, config.ffn_size, config.vocab_size
    # Bytes of a row: the residual stream twice in float32; normed rows; Q, K, V and attention's output; gate, up and
    # their product.
    row = 8 * hidden + dtype.itemsize * (2 * hidden + (3 * heads + 2 * kv_heads) * dim + 3 * ffn)
    attention = (MAX_SPLITS + MAX_ROWS) * heads * (dim + 1) * 4
    rope_tables = (1 + bool(config.local_rope_theta)) * config.max_positions * dim * 4
    return MAX_ROWS * row + attention + rope_tables + LOGIT_ROWS * vocab * 4 + GRAPH_BYTES


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
