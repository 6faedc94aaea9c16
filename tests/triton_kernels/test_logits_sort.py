"""Candidates in the order of their ranks."""

import numpy as np
import pytest

from tests.triton_kernels.draws import Draw, check, random_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]


def test_equal_candidates_rank_by_their_index(device):
    rows = np.round(random_rows(3, 900, scale=1.0)).astype(np.float32)  # some 10 values in all
    rows[2] = 0.25
    check(rows, [Draw(top_k=50, seed=9), Draw(top_p=0.7, seed=10), Draw(top_k=700, seed=11)], device)
