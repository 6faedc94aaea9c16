"""Gumbel watermark: marks a text without changing any probability; --detect tests for the mark.

    symphony run gumbel "Once upon a time" --key 7 --max-tokens 100
    symphony run gumbel --key 7 --detect "a text that may have been drawn so"

A key and the last tokens give each token of the vocabulary a number r in [0, 1). The token with the greatest r^(1/p)
is taken, where p is the token's probability. Over all keys this is a fair draw (the Gumbel trick), so the mark does not
make the text worse. With the key, a test sees that the tokens have an r near 1. Without the mark, the sum of -log(1 -
r) over n tokens has a gamma distribution, which gives a p-value. (Aaronson 2022)
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import libsym as sym

NUM_BEFORE = 3


def numbers(key: int, before: Sequence[int], vocab_size: int) -> npt.NDArray[np.float64]:
    """Return a random number in [0, 1) for each token of the vocabulary. The key and `before` are the seed."""
    return np.random.default_rng((key, *before)).random(vocab_size)


def choose(probs: npt.ArrayLike, r: npt.NDArray[np.float64]) -> int:
    """Return the token with the greatest r^(1/p), by logarithms."""
    p = np.asarray(probs, np.float64)
    return int(np.argmax(np.log(r) / np.maximum(p, 1e-300)))


def generate(kv: sym.KV, prompt: list[int], key: int, max_tokens: int) -> list[int]:
    context = list(prompt)

    def draw(dist: sym.Dist) -> int:
        context.append(choose(dist.probs(), numbers(key, context[-NUM_BEFORE:], dist.vocab_size)))
        return context[-1]

    return list(sym.decode(kv, prompt, draw, max_tokens=max_tokens))


def p_value(tokens: list[int], key: int, vocab_size: int) -> float:
    """Return the probability that a text without the watermark reaches the sum of these tokens. A repeated run counts
    once.
    """
    runs = {tuple(tokens[at - NUM_BEFORE : at + 1]) for at in range(NUM_BEFORE, len(tokens))}
    total = sum(-math.log1p(-numbers(key, run[:-1], vocab_size)[run[-1]]) for run in runs)
    # For a gamma distribution with integer shape n: P(sum >= s) = exp(-s) * (1 + s + ... + s^(n-1) / (n-1)!)
    terms = (math.exp(k * math.log(total) - total - math.lgamma(k + 1)) for k in range(len(runs)))
    return math.fsum(terms) if runs else 1.0


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "to go on with, or with --detect to look at")
    arguments.add_argument("--detect", action="store_true", help="say how likely such a text is without the watermark")
    arguments.whole("--key", "the secret of the watermark", 1, least=0)
    arguments.whole("--max-tokens", default=100)
    args = arguments.parse_args()
    tokens = sym.tokenize(args.text)
    if args.detect:
        print(f"p = {p_value(tokens, args.key, sym.model_info().vocab_size):.3g}")
    else:
        print(sym.detokenize(generate(sym.kv_create(), tokens, args.key, args.max_tokens)))
