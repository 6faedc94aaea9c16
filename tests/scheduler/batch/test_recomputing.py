"""Times that computing entries again would take."""

import numpy as np

from scheduler.batch.cost_model import RECORD, CostModel
from scheduler.batch.recomputing import Recomputing


def test_longer_files_take_more_than_in_proportion_and_what_is_learnt_counts() -> None:
    cost = CostModel("cpu", "", None)
    again = Recomputing(cost)
    one, short, long, longer = again(np.array([1.0, 4.0, 100.0, 200.0]))
    assert 0 < one < again(np.array([2.0]))[0] < short < long < longer
    assert longer > 2 * long, "each entry sees those before it"
    slow = np.zeros(64, RECORD)
    slow["num_rows"] = slow["num_pairs"] = np.arange(1, 65) * 32
    slow["ns"] = slow["num_rows"] * 50_000_000
    for _ in range(20):
        cost.observe(slow)
    again.learn()
    assert again(np.array([4.0]))[0] > 2 * short
