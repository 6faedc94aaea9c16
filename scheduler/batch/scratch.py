"""Scratch memory for rows of logits that no program gets."""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_KEPT = 64
"""Maximum number of free rows that are kept for reuse: 13 MB for a vocabulary of 49,152."""


class Scratch:
    """Buffers for rows of logits that are read after their step, and then reused."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._free: list[memoryview[float]] = []

    def take(self, count: int) -> list[memoryview[float]]:
        return [self._free.pop() if self._free else self._new() for _ in range(count)]

    def give_back(self, rows: list[memoryview[float]]) -> None:
        self._free += rows[: MAX_KEPT - len(self._free)]

    def _new(self) -> memoryview[float]:
        row: Any = np.empty(self._vocab_size, np.float32)
        return memoryview(row)
