"""Draws to test with: the rule in numpy, and the sampler in C that programs and the daemon use.

A machine that is there for its GPU has no C extension: the rule in numpy is what is compared with there.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from triton_kernels.logits import process_logits
from triton_kernels.logits_draw import ALL_BUT_NOTHING
from triton_kernels.logits_rows import RowSettings, TokenLists

try:
    from libsym._channel import ffi, lib
    from libsym.rows.sampler import RowSampler, Sampler
except ImportError:
    lib = None

HAS_SAMPLER = lib is not None

VOCAB_SIZE = 5003  # two blocks, the second not whole, its last group of 32 neither


STRIDE = 0x9E3779B97F4A7C15


def mixed(z: int) -> int:
    z %= 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@dataclass(frozen=True, slots=True)
class Draw:
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
        """libsym's first of the seed: splitmix64, of a stream that begins at the mixed seed."""
        stream = mixed(self.seed + STRIDE)
        return (mixed(stream + STRIDE) >> 11) * 2.0**-53

    def expected(self, row: np.ndarray, allowed: np.ndarray | None, *, lists: bool) -> int:
        token = self.by_the_rule(row, allowed, self.uniform, lists=lists)
        if HAS_SAMPLER:
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
        """Draw with the C sampler; the settings have to be those that a float32 holds."""
        penalties: dict[str, Any] = {
            "repetition_penalty": self.repetition,
            "presence_penalty": self.presence,
            "frequency_penalty": self.frequency,
            "logit_bias": self.biases,
        }
        sampler = Sampler(
            temperature=rounded(self.temperature),
            top_k=self.top_k or None,
            top_p=rounded(self.top_p),
            min_p=rounded(self.min_p),
            seed=self.seed,
            **(penalties if lists else {}),
        )
        block = sampler.block(self.before, self.generated, None if allowed is None else allowed.tobytes())
        return RowSampler(block, len(row)).draw(cast("memoryview[float]", row.data), index=0)

    def from_the_sampler(self, row: np.ndarray, uniform: float) -> int:
        """The same for a uniform number of one's own; nothing but cuts is used."""
        cuts = self.top_k, self.top_p, rounded(self.min_p), uniform
        token: int = lib.sym_row_sample(ffi.from_buffer("float[]", row), len(row), ffi.NULL, self.temperature, *cuts)
        return token


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
    numbers = [torch.tensor(each, dtype=torch.int32, device=device) for each in (first, tokens, counts)]
    return TokenLists(numbers[0], numbers[1], torch.tensor(biases, dtype=torch.float32, device=device), numbers[2])


def random_rows(rows: int, vocab_size: int = VOCAB_SIZE, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((rows, vocab_size))).astype(np.float32)


def random_allowed(rows: int, part: float) -> np.ndarray:
    bits = np.random.default_rng(7).random((rows, -(-VOCAB_SIZE // 32) * 32)) < part
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


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


SOME = [Draw(temperature=0.0), Draw(seed=11), Draw(top_k=30, seed=12), Draw(top_p=0.9, seed=13)]
