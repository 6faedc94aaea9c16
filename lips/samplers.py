"""Samplers of a few lines: min-p, eta, top-a, XTC, adaptive; and libsym's typical, DRY, mirostat.

    symphony run samplers "Once upon a time" --sampler min_p
    symphony run samplers "Once upon a time" --sampler mirostat --seed 3 --max-tokens 80

Each of the first five is a function that takes the probabilities and returns weights. A token is then drawn by weight.
A new sampler takes three lines here, and no change to the daemon.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

import libsym as sym

Probs = npt.NDArray[np.float64]
Sampler = Callable[[Probs, np.random.Generator], Probs]
"""Function that takes probabilities and a random generator, and returns weights. The weights may have any sum."""


def min_p(p: Probs, _rng: np.random.Generator, least: float = 0.1) -> Probs:
    return np.where(p >= least * p.max(), p, 0)


def top_a(p: Probs, _rng: np.random.Generator, a: float = 0.2) -> Probs:
    return np.where(p >= a * p.max() ** 2, p, 0)


def eta(p: Probs, _rng: np.random.Generator, epsilon: float = 3e-3) -> Probs:
    least = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy(p)))
    return np.where((p >= least) | (p == p.max()), p, 0)


def xtc(p: Probs, rng: np.random.Generator, threshold: float = 0.1, chance: float = 0.5) -> Probs:
    top = np.flatnonzero(p >= threshold)  # excludes the top choices, except the least likely of them
    return np.where((p >= threshold) & (p > p[top].min()), 0, p) if len(top) > 1 and rng.random() < chance else p


def adaptive(p: Probs, _rng: np.random.Generator, base: float = 0.8, theta: float = 0.5) -> Probs:
    temperature = base * 0.8 ** (theta / max(entropy(p), 1e-6))  # low entropy gives a low temperature; at most `base`
    return np.asarray(np.exp(np.log(p / p.max()) / max(temperature, 1e-3)))


def entropy(p: Probs) -> float:
    return float(-np.sum(p * np.log(p)))


SAMPLERS: dict[str, Sampler | sym.Sampler] = {
    **{each.__name__: each for each in (min_p, top_a, eta, xtc, adaptive)},
    "typical": sym.Sampler(typical_p=0.9),
    "dry": sym.Sampler(dry=sym.Dry()),
    "mirostat": sym.Sampler(mirostat=sym.Mirostat(tau=3.0)),
}


def generate(kv: sym.KV, prompt: list[int], sampler: Sampler | sym.Sampler, seed: int, max_tokens: int) -> sym.Decoding:
    if isinstance(sampler, sym.Sampler):
        return sym.decode(kv, prompt, replace(sampler, seed=seed).start(before=prompt).draw, max_tokens=max_tokens)
    rng = np.random.default_rng(seed)

    def draw(dist: sym.Dist) -> int:
        p = np.maximum(np.asarray(dist.probs(), np.float64), 1e-300)  # so that no logarithm is infinite
        weights = sampler(p, rng)
        return int(rng.choice(len(p), p=weights / weights.sum()))

    return sym.decode(kv, prompt, draw, max_tokens=max_tokens)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("prompt", "the text to go on with")
    arguments.add_argument("--sampler", choices=SAMPLERS, default="min_p", help="(default: %(default)s)")
    arguments.whole("--seed", default=0, least=0)
    arguments.whole("--max-tokens", default=64)
    args = arguments.parse_args()
    kv, prompt = sym.kv_create(), sym.tokenize(args.prompt)
    found = generate(kv, prompt, SAMPLERS[args.sampler], args.seed, args.max_tokens)
    sym.send_to_user(found.text(), "\n")
