"""Candidates of a row: the entries that a token is drawn from."""

import numpy as np
import pytest
import torch

from tests.triton_kernels.draws import VOCAB_SIZE, Draw, random_rows, settings_of
from triton_kernels.logits import process_logits
from triton_kernels.logits_rows import scratch_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]


def nucleus(row: np.ndarray, top_p: float) -> int:
    """How many of the likeliest entries hold so much of the mass."""
    weights = np.sort(np.exp(row.astype(np.float64)))[::-1]
    return int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1


@pytest.mark.parametrize("draw", [Draw(top_k=40), Draw(top_p=0.9)])
def test_the_candidates_are_the_likeliest_entries_and_hardly_more_than_are_asked_for(device, draw):
    rows = random_rows(1)
    scratch = scratch_for(1, VOCAB_SIZE, device)
    process_logits(torch.from_numpy(rows.copy()).to(device), settings_of([draw], device), scratch=scratch)
    count = int(scratch.counts[0])
    found = {key & 0xFFFFFFFF for key in scratch.candidates[0, :count].tolist()}
    assert found == set((-rows[0]).argsort()[:count].tolist())
    asked = draw.top_k or nucleus(rows[0], draw.top_p)
    assert asked <= count < 2 * asked + 32
