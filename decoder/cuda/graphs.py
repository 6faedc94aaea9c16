"""Captured graphs of passes of decodes: one launch in place of some hundred launches.

A graph keeps the addresses and sizes of its capture. So passes are padded: rows to one of `BUCKETS`, and page tables to
a power of two (`passes.py` has both). A padding row (token and entry -1, length 0) reads and stores nothing, and its
logits are dropped.

The first pass of a size runs without a graph, and compiles its kernels. The second pass of the size captures a graph.
Without a GPU, every pass runs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from decoder.cuda.device import Device

MAX_GRAPHS = 64
"""Maximum number of graphs. Each graph takes some MB, and a new graph evicts the least recently used graph."""


@dataclass(frozen=True, slots=True)
class DecodeSize:
    """The size of a pass. Each size has a graph of its own."""

    rows: int
    table_pages: int
    is_shared: bool
    """Whether some rows share a prefix."""


class DecodeGraphs:
    """Graphs of one function, by size. The function works only on buffers that keep their addresses."""

    def __init__(self, device: Device, run: Callable[[DecodeSize], None]) -> None:
        self._device, self._run = device, run
        self._graphs: dict[DecodeSize, torch.cuda.CUDAGraph] = {}
        self._has_run: set[DecodeSize] = set()
        self._pool = torch.cuda.graph_pool_handle() if device.is_gpu else None
        """Memory pool that all graphs share. A graph's memory holds no data between launches of the graph."""

    def run(self, size: DecodeSize) -> None:
        """Run the function in the order of the current stream. On a GPU, a size has a graph from its second run on."""
        if not self._device.is_gpu or size not in self._has_run:
            self._run(size)
            self._has_run.add(size)
            return
        graph = self._graphs.pop(size, None)
        if graph is None:
            graph = self._captured(size)
        self._graphs[size] = graph  # the dict is in the order of last use
        graph.replay()

    def _captured(self, size: DecodeSize) -> torch.cuda.CUDAGraph:
        if len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        graph = torch.cuda.CUDAGraph()
        # Capture only this thread: the arena's thread brings pages meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            self._run(size)
        finally:
            graph.capture_end()
        return graph
