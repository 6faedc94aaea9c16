"""Which documents are asked for: popularity by a Pareto index."""

from __future__ import annotations

import random


class Popularity:
    """Shares of documents that are themselves Pareto-distributed: the one of rank r has a weight of r^(-1/index).

    An index of 3 is nearly flat, 1 is Zipf's law, 0.5 is steep: the first of 48 documents is then asked for in six of
    ten questions.
    """

    def __init__(self, num_documents: int, index: float) -> None:
        self._weights = [(rank + 1) ** (-1 / index) for rank in range(num_documents)]

    def draw(self, rng: random.Random, count: int) -> list[int]:
        return rng.choices(range(len(self._weights)), self._weights, k=count)
