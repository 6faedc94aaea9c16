"""Captured graphs of passes of decodes: one launch instead of some hundred, for the sizes that occur.

A graph has the addresses and sizes of its capture, so passes are padded: rows to one of `BUCKETS` and page tables to a
power of two (`passes.py` has both). A padding row (token and entry -1, length 0) stores nothing, reads nothing, and its
logits go nowhere.
A size that comes for the first time runs as it is, which compiles what it needs; when it comes again it is captured.
Where there is no GPU nothing is captured, and all else is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from decoder.cuda.device import Device

MAX_GRAPHS = 64
"""The one that was not used for the longest time goes. Some MB each."""


@dataclass(frozen=True, slots=True)
class DecodeSize:
    """What a captured graph is made for."""

    rows: int
    table_pages: int
    is_shared: bool
    """Some rows read a prefix together."""


class DecodeGraphs:
    """Runs a function of a size whose every effect is on buffers that stay where they are."""

    def __init__(self, device: Device, run: Callable[[DecodeSize], None]) -> None:
        self._device, self._run = device, run
        self._graphs: dict[DecodeSize, torch.cuda.CUDAGraph] = {}
        self._has_run: set[DecodeSize] = set()
        self._pool = torch.cuda.graph_pool_handle() if device.is_gpu else None
        """One for all: a graph's own memory holds nothing between its launches."""

    def run(self, size: DecodeSize) -> None:
        """In the order of the current stream."""
        if not self._device.is_gpu or size not in self._has_run:
            self._run(size)
            self._has_run.add(size)
            return
        graph = self._graphs.pop(size, None)
        if graph is None:
            graph = self._captured(size)
        self._graphs[size] = graph  # the last one used is the last in the dict
        graph.replay()

    def _captured(self, size: DecodeSize) -> torch.cuda.CUDAGraph:
        if len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: others go on bringing pages meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            self._run(size)
        finally:
            graph.capture_end()
        return graph
