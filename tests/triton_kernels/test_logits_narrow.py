"""Rows with more candidates than are sorted."""

import numpy as np
import pytest

from tests.triton_kernels.draws import Draw, check, random_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]


FLAT = [
    Draw(temperature=2.0, top_p=0.97, seed=3),
    Draw(temperature=1.5, top_k=1500, seed=4),
    Draw(temperature=1.5, top_k=2500, top_p=0.9, min_p=0.4, seed=5),
]


@pytest.mark.slow
def test_rows_with_more_candidates_than_are_sorted(device):
    check(random_rows(3, 2600, scale=0.5), FLAT, device)


def test_equal_logits_rank_by_their_index(device):
    rows = np.round(random_rows(3, 2600, scale=1.0)).astype(np.float32)  # some 10 values in all
    rows[1:] = 0.25
    check(rows, [Draw(top_k=1800, seed=9), Draw(top_k=50, seed=9), Draw(top_p=0.7, seed=10)], device)
