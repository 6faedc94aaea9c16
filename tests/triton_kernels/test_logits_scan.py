"""Caps, masks, penalties and biases, as they change what is drawn."""

import numpy as np
import pytest

from tests.triton_kernels.draws import SOME, Draw, check, random_allowed, random_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("part", [0.5, 0.001])
def test_what_is_not_allowed_is_never_drawn(device, part):
    allowed = random_allowed(4, part)
    for row, token in enumerate(check(random_rows(4), SOME, device, allowed=allowed)):
        assert allowed[row, token // 32] >> (token % 32) & 1


def test_penalties_and_biases_change_the_tokens_that_are_listed(device):
    rows = random_rows(4)
    best = [tuple(np.argsort(-row)[:5].tolist()) for row in rows]
    draws = [
        Draw(temperature=0.0, repetition=1.5, before=best[0]),
        Draw(temperature=0.0, presence=2.0, frequency=1.0, generated=best[1] * 3, before=best[1][:2]),
        Draw(top_p=0.9, seed=1, biases={best[2][0]: -np.inf, 4999: 20.0, best[2][1]: 1.5}, before=best[2][1:3]),
        Draw(seed=2, repetition=0.8, generated=tuple(range(4090, 4600)), frequency=-0.5),
    ]
    unchanged = check(rows, draws, device)
    assert all(a != b for a, b in zip(unchanged[:3], check(rows, draws, device, lists=True)[:3], strict=True))
    check(rows, draws, device, lists=True, allowed=random_allowed(4, 0.7))


def test_final_logits_are_capped_in_place(device):
    check(random_rows(4, scale=30.0), SOME, device, softcap=30.0)
