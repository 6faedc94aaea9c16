"""The time that computing entries again would take, by the cost model: a page on disk saves it."""

from __future__ import annotations

import numpy as np

from kvfs.tiers.policy import FloatArray
from libsym.abi import PAGE_ENTRIES
from scheduler.batch.cost_model import RECORD, CostModel

_NUM_PAGES = np.array([float(1 << power) for power in range(13)])


class Recomputing:
    """Satisfies `Engine.compute_s`. Between powers of two it is interpolated: it is asked about all files at once."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._seconds: FloatArray = np.zeros(len(_NUM_PAGES))
        self.learn()

    def learn(self) -> None:
        """The model has learnt something."""
        rows = (_NUM_PAGES * PAGE_ENTRIES).astype(np.int64)
        records = np.zeros(len(rows), RECORD)
        records["num_rows"], records["num_pairs"] = rows, rows * rows // 2
        self._seconds = self._cost.predict(records) * 1e-9

    def __call__(self, num_pages: FloatArray) -> FloatArray:
        """Seconds, of files of so many pages each."""
        return np.asarray(np.interp(num_pages, _NUM_PAGES, self._seconds), np.float64)
