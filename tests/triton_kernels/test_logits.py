"""Tokens drawn on the device: all of the kernels, against the rule and the sampler in C."""

import errno

import numpy as np
import pytest
import torch

from tests.triton_kernels.draws import (
    HAS_SAMPLER,
    SOME,
    VOCAB_SIZE,
    Draw,
    check,
    random_allowed,
    random_rows,
    settings_of,
)
from triton_kernels.logits import process_logits
from triton_kernels.logits_rows import scratch_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

ALL_WAYS = [
    Draw(
        temperature=[0.0, 0.7, 1.0, 1.3][row % 4],
        top_k=[0, 40, 1, 0, 5, VOCAB_SIZE + 9][row % 6],
        top_p=[1.0, 0.9, 0.5, 0.95, 1.0][row % 5],
        min_p=[0.0, 0.05, 0.0][row % 3],
        seed=row,
    )
    for row in range(33)
]
FLAT = [
    Draw(temperature=2.0, top_p=0.97, seed=3),
    Draw(temperature=1.5, top_k=1500, seed=4),
    Draw(temperature=1.5, top_k=2500, top_p=0.9, min_p=0.4, seed=5),
]
SORTED = [Draw(top_k=50, seed=9), Draw(top_p=0.7, seed=10), Draw(top_k=700, seed=11)]
NARROWED = [Draw(top_k=1800, seed=9), Draw(top_k=50, seed=9), Draw(top_p=0.7, seed=10)]
SHORT = [Draw(), Draw(top_p=0.5, seed=1), Draw(top_k=2, seed=2), Draw(temperature=0.0)]


def few_values(size: int) -> np.ndarray:
    """Rows of some 10 values in all, and one of a single value: equal logits rank by their index."""
    rows = np.round(random_rows(3, size, scale=1.0)).astype(np.float32)
    rows[2] = 0.25
    return rows


@pytest.mark.parametrize(
    ("rows", "draws", "options"),
    [
        (random_rows(33, 700), ALL_WAYS, {}),
        *(
            (random_rows(4, size), SHORT, {"allowed": np.full((4, -(-size // 32)), -1, np.int32)})
            for size in (1, 31, 259)
        ),
        (random_rows(3, 2600, scale=0.5), FLAT, {}),
        (few_values(900), SORTED, {}),
        (few_values(2600), NARROWED, {}),
        (few_values(2600)[[0, 2, 2]], NARROWED, {}),
        (random_rows(4, scale=30.0), SOME, {"softcap": 30.0}),
    ],
    ids=["all ways", "1 token", "31 tokens", "259 tokens", "flat", "sorted", "narrowed", "equal", "softcap"],
)
def test_the_token_is_the_one_that_the_rule_draws(device, rows, draws, options):
    check(rows, draws, device, **options)


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


def test_a_greedy_row_has_the_first_of_its_largest_entries(device):
    rows = random_rows(2)
    rows[:, [4, 70, VOCAB_SIZE - 1]] = 40.0
    assert check(rows, [Draw(temperature=0.0), Draw(top_k=1)], device) == [4, 4]


@pytest.mark.parametrize(("bad", "error"), [(np.nan, errno.EDOM), (np.inf, errno.EDOM), (None, errno.ERANGE)])
def test_a_row_that_is_no_distribution_or_has_nothing_possible_is_refused_alone(device, bad, error):
    rows, allowed = random_rows(3, 100), np.full((3, 4), -1, np.int32)
    if bad is None:
        allowed[1] = 0
    else:
        rows[1, 70] = bad
    settings = settings_of([Draw(), Draw(top_k=5) if bad is None else Draw(), Draw(temperature=0.0)], device)
    on_device, masks = torch.from_numpy(rows).to(device), torch.from_numpy(allowed).to(device)
    tokens, logprobs = process_logits(on_device, settings, allowed=masks if bad is None else None)
    assert tokens[1] == -error
    assert logprobs[1] == -np.inf
    assert (tokens[[0, 2]] >= 0).all()


def nucleus(row: np.ndarray, top_p: float) -> int:
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
        if HAS_SAMPLER:
            assert token == draw.from_the_sampler(row, uniform)


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
