"""Expected time of computing entries again. Policies of the tiers compare this time with that of reading pages."""

from __future__ import annotations

import numpy as np

from kvfs.tiers.policy import FloatArray
from libsym.abi import PAGE_ENTRIES
from scheduler.batch.cost_model import RECORD, CostModel

_NUM_PAGES = np.array([float(1 << power) for power in range(13)])


class Recomputing:
    """Implementation of `Engine.compute_s`. To be fast for many files, it interpolates between powers of two."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._seconds: FloatArray = np.zeros(len(_NUM_PAGES))
        self.learn()

    def learn(self) -> None:
        """Compute the table of predicted seconds again, after the cost model has learnt."""
        rows = (_NUM_PAGES * PAGE_ENTRIES).astype(np.int64)
        records = np.zeros(len(rows), RECORD)
        records["num_rows"], records["num_pairs"] = rows, rows * rows // 2
        self._seconds = self._cost.predict(records) * 1e-9

    def __call__(self, num_pages: FloatArray) -> FloatArray:
        """Return the seconds for each file. `num_pages`: number of pages of each file."""
        return np.asarray(np.interp(num_pages, _NUM_PAGES, self._seconds), np.float64)
