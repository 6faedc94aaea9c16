"""The token that a uniform number falls on."""

import numpy as np
import pytest
import torch

from tests.triton_kernels.draws import Draw, lib, random_rows, settings_of
from triton_kernels.logits import process_logits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_uniform_numbers_give_the_first_and_the_last_token(device, uniform):
    rows = random_rows(4, 300)
    rows[:, 250:] = -np.inf
    draws = [Draw(), Draw(top_k=40), Draw(top_p=0.9), Draw(min_p=0.1)]
    settings = settings_of(draws, device)
    settings.uniform.fill_(uniform)
    tokens, _ = process_logits(torch.from_numpy(rows.copy()).to(device), settings)
    for row, draw, token in zip(rows, draws, tokens.tolist(), strict=True):
        assert token == draw.by_the_rule(row, None, uniform)
        if lib is not None:
            assert token == draw.from_the_sampler(row, uniform)
