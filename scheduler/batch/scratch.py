"""Memory for rows of logits that no program gets."""

from __future__ import annotations

from typing import Any

import numpy as np


class Scratch:
    """Rows of logits that nobody waits for: drawn from or reduced in the step's thread, then used again."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._blocks: list[memoryview[float]] = []

    def rows(self, count: int) -> list[memoryview[float]]:
        """The first `count` rows; made when they are first needed, and kept."""
        while len(self._blocks) < count:
            row: Any = np.empty(self._vocab_size, np.float32)
            self._blocks.append(memoryview(row))
        return self._blocks[:count]
