"""Tokens drawn on the device: all of the kernels, against the rule and the sampler in C."""

import numpy as np
import pytest
import torch

from tests.triton_kernels.draws import SOME, VOCAB_SIZE, Draw, check, random_rows, settings_of
from triton_kernels.logits import process_logits
from triton_kernels.logits_rows import scratch_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.slow
def test_a_batch_of_33_mixes_all_ways_of_drawing(device):
    draws = [
        Draw(
            temperature=[0.0, 0.7, 1.0, 1.3][row % 4],
            top_k=[0, 40, 1, 0, 5, VOCAB_SIZE + 9][row % 6],
            top_p=[1.0, 0.9, 0.5, 0.95, 1.0][row % 5],
            min_p=[0.0, 0.05, 0.0][row % 3],
            seed=row,
        )
        for row in range(33)
    ]
    check(random_rows(33, 700), draws, device)


@pytest.mark.parametrize("vocab_size", [1, 31, 259])
def test_vocabularies_shorter_than_a_block(device, vocab_size):
    draws = [Draw(), Draw(top_p=0.5, seed=1), Draw(top_k=2, seed=2), Draw(temperature=0.0)]
    check(random_rows(4, vocab_size), draws, device, allowed=np.full((4, -(-vocab_size // 32)), -1, np.int32))


def test_a_row_gives_the_same_bits_alone_and_among_others_with_scratch_that_is_kept(device):
    rows = torch.from_numpy(random_rows(4, scale=2.0)).to(device)
    scratch = scratch_for(9, VOCAB_SIZE, device)
    out = torch.full((4,), 7, dtype=torch.int32, device=device), torch.full((4,), 7.0, device=device)
    together = process_logits(rows, settings_of(SOME, device), scratch=scratch, out=out)
    assert all(a is b for a, b in zip(together, out, strict=True))
    for row in (1, 3):
        alone = process_logits(rows[row : row + 1], settings_of(SOME[row : row + 1], device), scratch=scratch)
        assert alone[0] == out[0][row]
        assert torch.equal(alone[1], out[1][row : row + 1])
