"""Samplers of a few lines each: min-p, typical, eta, top-a, XTC, mirostat, DRY, adaptive temperature.

    symphony run samplers "Once upon a time" --sampler min_p
    symphony run samplers "Once upon a time" --sampler mirostat --seed 3 --max-tokens 80

Each is a function of the probabilities, which gives those that are left; one is then drawn. A new idea of how to draw
is three lines here, and no change to the daemon.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import libsym as sym

Probs = npt.NDArray[np.float64]
Sampler = Callable[[Probs, list[int], np.random.Generator], Probs]
"""Is given probabilities, the tokens so far and a source of chance; gives weights, which need not add up to 1."""


def min_p(p: Probs, _tokens: list[int], _rng: np.random.Generator, least: float = 0.1) -> Probs:
    return np.where(p >= least * p.max(), p, 0)


def top_a(p: Probs, _tokens: list[int], _rng: np.random.Generator, a: float = 0.2) -> Probs:
    return np.where(p >= a * p.max() ** 2, p, 0)


def eta(p: Probs, _tokens: list[int], _rng: np.random.Generator, epsilon: float = 3e-3) -> Probs:
    least = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy(p)))
    return np.where((p >= least) | (p == p.max()), p, 0)


def typical(p: Probs, _tokens: list[int], _rng: np.random.Generator, mass: float = 0.9) -> Probs:
    order = np.argsort(np.abs(-np.log(p) - entropy(p)), kind="stable")  # whose surprise is nearest to the expected one
    is_kept = np.zeros(len(p), bool)
    is_kept[order[: int(np.searchsorted(np.cumsum(p[order]), mass)) + 1]] = True
    return np.where(is_kept, p, 0)


def xtc(p: Probs, _tokens: list[int], rng: np.random.Generator, threshold: float = 0.1, chance: float = 0.5) -> Probs:
    top = np.flatnonzero(p >= threshold)  # excludes top choices: all but the least likely one of them
    return np.where((p >= threshold) & (p > p[top].min()), 0, p) if len(top) > 1 and rng.random() < chance else p


def adaptive(p: Probs, _tokens: list[int], _rng: np.random.Generator, base: float = 0.8, theta: float = 0.5) -> Probs:
    temperature = base * 0.8 ** (theta / max(entropy(p), 1e-6))  # sure of itself: colder; undecided: as `base` says
    return np.asarray(np.exp(np.log(p / p.max()) / max(temperature, 1e-3)))


def dry(p: Probs, tokens: list[int], _rng: np.random.Generator, base: float = 1.75, allowed: int = 2) -> Probs:
    """Don't repeat yourself: what goes on with a repetition of n tokens is 0.8 * base^(n - allowed) nats worse."""
    longest = dict[int, int]()
    for at in range(len(tokens) - 1):
        n = 0
        while n <= at and n < 50 and tokens[at - n] == tokens[-1 - n]:
            n += 1
        longest[tokens[at + 1]] = max(longest.get(tokens[at + 1], 0), n)
    penalty = np.zeros(len(p))
    penalty[list(longest)] = [base ** (n - allowed) if n >= allowed else 0 for n in longest.values()]
    return np.asarray(p * np.exp(-0.8 * penalty))


def mirostat(tau: float = 3.0, rate: float = 0.1) -> Sampler:
    """Keeps the surprise of the text, -log2 p of each token, near tau: the limit follows what was drawn."""
    limit, last = 2 * tau, np.zeros(0, np.float64)

    def sampler(p: Probs, tokens: list[int], _rng: np.random.Generator) -> Probs:
        nonlocal limit, last
        if last.size:
            limit -= rate * (-math.log2(last[tokens[-1]]) - tau)
        last = np.where((-np.log2(p) <= limit) | (p == p.max()), p, 0)
        last /= last.sum()
        return last

    return sampler


def entropy(p: Probs) -> float:
    return float(-np.sum(p * np.log(p)))


SAMPLERS: dict[str, Sampler] = {each.__name__: each for each in (min_p, top_a, eta, typical, xtc, adaptive, dry)}


def generate(kv: sym.KV, prompt: list[int], sampler: Sampler, seed: int, max_tokens: int) -> sym.Decoding:
    tokens, rng = list(prompt), np.random.default_rng(seed)

    def draw(dist: sym.Dist) -> int:
        p = np.maximum(np.asarray(dist.probs(), np.float64), 1e-300)  # logarithms of 0 help nobody
        weights = sampler(p, tokens, rng)
        tokens.append(int(rng.choice(len(p), p=weights / weights.sum())))
        return tokens[-1]

    return sym.decode(kv, prompt, draw, max_tokens=max_tokens)


def main() -> None:
    arguments = sym.Arguments(__doc__)
    arguments.text("prompt", "the text to go on with")
    arguments.add_argument("--sampler", choices=[*SAMPLERS, "mirostat"], default="min_p", help="(default: %(default)s)")
    arguments.whole("--seed", default=0, least=0)
    arguments.whole("--max-tokens", default=64)
    args = arguments.parse_args()
    with sym.kv_create() as kv:
        sampler = SAMPLERS.get(args.sampler) or mirostat()
        sym.send_to_user(generate(kv, sym.tokenize(args.prompt), sampler, args.seed, args.max_tokens).text())
    sym.send_to_user("\n")


if __name__ == "__main__":
    sym.main(main)
