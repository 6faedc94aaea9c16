"""Tokens drawn on the device against the rule in numpy, and against the sampler in C that programs and the daemon use.

A machine that is there for its GPU has no C extension: the rule in numpy is what is compared with there.
"""

import errno
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from triton_kernels.logits import ALL_BUT_NOTHING, RowSettings, TokenLists, process_logits, scratch_for

try:
    from libsym._channel import ffi, lib
    from libsym.rows.sampler import RowSampler, Sampler
except ImportError:
    lib = None

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

VOCAB_SIZE = 5003  # two blocks, the second not whole, its last group of 32 neither


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's settings, as both sides take them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    before: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    biases: dict[int, float] = field(default_factory=dict)

    @property
    def uniform(self) -> float:
        """libsym's, from the seed: splitmix64."""
        z = (self.seed + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return ((z ^ z >> 31) >> 11) * 2.0**-53

    def expected(self, row: np.ndarray, allowed: np.ndarray | None, *, lists: bool) -> int:
        token = self.by_the_rule(row, allowed, self.uniform, lists=lists)
        if lib is not None:
            assert token == self.by_the_sampler(row, allowed, lists=lists)
        return token

    def by_the_rule(self, row: np.ndarray, allowed: np.ndarray | None, uniform: float, *, lists: bool = False) -> int:
        values = row.copy()
        for token in {*self.before, *self.generated, *self.biases} if lists else ():
            value, count = values[token] + np.float32(self.biases.get(token, 0.0)), self.generated.count(token)
            if count or token in self.before:
                value = value * np.float32(self.repetition) if value < 0 else value / np.float32(self.repetition)
            values[token] = value - (np.float32(self.frequency) * count + np.float32(self.presence)) * (count > 0)
        if allowed is not None:
            bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(row)]
            values[bits == 0] = -np.inf
        if self.temperature == 0.0 or self.top_k == 1:
            return int(values.argmax())
        weights = np.exp((values.astype(np.float64) - values.max()) / rounded(self.temperature))
        tokens, lightest = np.arange(len(row)), rounded(self.min_p)
        if self.top_p < 1.0 or 0 < self.top_k < len(row):
            tokens = np.argsort(-values, kind="stable")[: self.top_k or None]
            held = np.cumsum(weights[tokens]) - weights[tokens]
            if self.top_p < 1.0:
                tokens = tokens[(held < rounded(self.top_p) * weights[tokens].sum()) | (held == 0.0)]
            lightest = lightest or ALL_BUT_NOTHING
        tokens = tokens[(weights[tokens] >= lightest) & (weights[tokens] > 0.0)]
        ends = np.cumsum(weights[tokens])
        return int(tokens[min(np.searchsorted(ends, uniform * ends[-1], side="right"), len(tokens) - 1)])

    def by_the_sampler(self, row: np.ndarray, allowed: np.ndarray | None, *, lists: bool) -> int:
        """What the C gives; its settings have to be those that a float32 holds."""
        sampler = Sampler(
            temperature=rounded(self.temperature),
            top_k=self.top_k or None,
            top_p=rounded(self.top_p),
            min_p=rounded(self.min_p),
            seed=self.seed,
            **(
                {
                    "repetition_penalty": self.repetition,
                    "presence_penalty": self.presence,
                    "frequency_penalty": self.frequency,
                    "logit_bias": self.biases,
                }
                if lists
                else {}
            ),
        )
        block = sampler.block(self.before, self.generated, None if allowed is None else allowed.tobytes())
        return RowSampler(block, len(row)).draw(memoryview(row), index=0)


def rounded(number: float) -> float:
    return float(np.float32(number))


def settings_of(draws: list[Draw], device: str) -> RowSettings:
    types = {"top_k": torch.int32, "uniform": torch.float64}
    return RowSettings(
        **{
            name: torch.tensor([getattr(draw, name) for draw in draws], dtype=types.get(name, torch.float32)).to(device)
            for name in RowSettings.__slots__
        }
    )


def lists_of(draws: list[Draw], device: str) -> TokenLists:
    first, tokens, biases, counts = [0], [], [], []
    for draw in draws:
        for token in {**dict.fromkeys(draw.before + draw.generated), **draw.biases}:
            tokens.append(token)
            biases.append(draw.biases.get(token, 0.0))
            seen = token in draw.before or token in draw.generated
            counts.append(draw.generated.count(token) if seen else -1)
        first.append(len(tokens))
    numbers = (torch.tensor(each, dtype=torch.int32, device=device) for each in (first, tokens, counts))
    first, tokens, counts = numbers
    return TokenLists(first, tokens, torch.tensor(biases, dtype=torch.float32, device=device), counts)


def random_rows(rows: int, vocab_size: int = VOCAB_SIZE, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((rows, vocab_size))).astype(np.float32)


def check(rows: np.ndarray, draws: list[Draw], device: str, *, allowed=None, lists=False, softcap=0.0) -> list[int]:
    """Draws on the device, and compares tokens and log-probabilities."""
    on_device = torch.from_numpy(rows.copy()).to(device)
    tokens, logprobs = process_logits(
        on_device,
        settings_of(draws, device),
        lists=lists_of(draws, device) if lists else None,
        allowed=None if allowed is None else torch.from_numpy(allowed).to(device),
        softcap=softcap,
    )
    if softcap:
        capped = softcap * np.tanh(rows.astype(np.float64) / softcap)
        np.testing.assert_allclose(on_device.cpu().numpy(), capped, rtol=0, atol=4e-6 * softcap)
    rows = on_device.cpu().numpy()
    masks = [None] * len(rows) if allowed is None else allowed
    expected = [draw.expected(*row, lists=lists) for draw, *row in zip(draws, rows, masks, strict=True)]
    assert tokens.tolist() == expected
    wide = rows.astype(np.float64)
    totals = wide.max(axis=1) + np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1))
    np.testing.assert_allclose(logprobs.tolist(), wide[range(len(rows)), expected] - totals, rtol=0, atol=1e-5)
    return expected


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


FLAT = [
    Draw(temperature=2.0, top_p=0.97, seed=3),
    Draw(temperature=1.5, top_k=1500, seed=4),
    Draw(temperature=1.5, top_k=2500, top_p=0.9, min_p=0.4, seed=5),
]


@pytest.mark.slow
def test_rows_with_more_candidates_than_are_sorted(device):
    check(random_rows(3, 2600, scale=0.5), FLAT, device)


def test_equal_logits_rank_by_their_index(device):
    rows = np.round(random_rows(5, 2600, scale=1.0)).astype(np.float32)  # some 10 values in all
    rows[2:4] = 0.25
    draws = [Draw(top_k=1800, seed=9), Draw(top_k=50, seed=9), Draw(top_p=0.7, seed=10), Draw(temperature=0.0)]
    check(rows, [*draws, Draw(temperature=0.0)], device)


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
        cut = draw.top_k, draw.top_p, rounded(draw.min_p), uniform
        if lib is not None:
            assert token == lib.sym_row_sample(ffi.from_buffer("float[]", row), 300, ffi.NULL, 1.0, *cut)


def random_allowed(rows: int, part: float) -> np.ndarray:
    bits = np.random.default_rng(7).random((rows, -(-VOCAB_SIZE // 32) * 32)) < part
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


SOME = [Draw(temperature=0.0), Draw(seed=11), Draw(top_k=30, seed=12), Draw(top_p=0.9, seed=13)]


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
