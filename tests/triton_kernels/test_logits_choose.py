"""Rows that are done before anything is collected."""

import errno

import numpy as np
import pytest
import torch

from tests.triton_kernels.draws import VOCAB_SIZE, Draw, check, random_rows, settings_of
from triton_kernels.logits import process_logits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("draw", [Draw(temperature=0.0), Draw(top_k=1)])
def test_a_greedy_row_has_the_first_of_its_largest_entries(device, draw):
    rows = random_rows(1)
    rows[0, [4, 70, VOCAB_SIZE - 1]] = 40.0
    assert check(rows, [draw], device) == [4]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_no_distribution_is_refused_alone(device, bad):
    rows = random_rows(3, 100)
    rows[1, 70] = bad
    tokens, logprobs = process_logits(torch.from_numpy(rows).to(device), settings_of([Draw()] * 3, device))
    assert tokens[1] == -errno.EDOM
    assert logprobs[1] == -np.inf
    assert (tokens[[0, 2]] >= 0).all()


def test_a_row_with_nothing_possible_is_refused_alone(device):
    allowed = np.full((3, 4), -1, np.int32)
    allowed[1] = 0
    settings = settings_of([Draw(), Draw(top_k=5), Draw(temperature=0.0)], device)
    rows = torch.from_numpy(random_rows(3, 100)).to(device)
    tokens, logprobs = process_logits(rows, settings, allowed=torch.from_numpy(allowed).to(device))
    assert tokens[1] == -errno.ERANGE
    assert logprobs[1] == -np.inf
    assert (tokens[[0, 2]] >= 0).all()
