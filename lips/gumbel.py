"""A watermark that changes no probability, and the test that finds it.

    symphony run gumbel "Once upon a time" --key 7 --max-tokens 100
    symphony run gumbel --key 7 --detect "a text that may have been drawn so"

A key and the last tokens give each token of the vocabulary a number r of [0, 1). The token with the greatest r^(1/p) is
taken: over all keys that is a fair draw (the Gumbel trick), so the text is as good as any. But the key tells that the
tokens have an r near 1. By chance -log(1 - r), summed over n tokens, has a gamma distribution: that gives a p-value.
(Aaronson 2022)
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import libsym as sym

NUM_BEFORE = 3


def numbers(key: int, before: Sequence[int], vocab_size: int) -> npt.NDArray[np.float64]:
    """The r of each token behind these."""
    return np.random.default_rng((key, *before)).random(vocab_size)


def choose(probs: npt.ArrayLike, r: npt.NDArray[np.float64]) -> int:
    """The greatest r^(1/p), by logarithms."""
    p = np.asarray(probs, np.float64)
    return int(np.argmax(np.log(r) / np.maximum(p, 1e-300)))


def generate(kv: sym.KV, prompt: list[int], key: int, max_tokens: int) -> list[int]:
    context = list(prompt)

    def draw(dist: sym.Dist) -> int:
        context.append(choose(dist.probs(), numbers(key, context[-NUM_BEFORE:], dist.vocab_size)))
        return context[-1]

    return list(sym.decode(kv, prompt, draw, max_tokens=max_tokens))


def p_value(tokens: list[int], key: int, vocab_size: int) -> float:
    """Return the probability of so great a sum in a text drawn in another way. Runs that come again tell nothing."""
    runs = {tuple(tokens[at - NUM_BEFORE : at + 1]) for at in range(NUM_BEFORE, len(tokens))}
    total = sum(-math.log1p(-numbers(key, run[:-1], vocab_size)[run[-1]]) for run in runs)
    # Of a gamma distribution with a whole shape n: P(sum >= s) = exp(-s) * (1 + s + ... + s^(n-1) / (n-1)!)
    terms = (math.exp(k * math.log(total) - total - math.lgamma(k + 1)) for k in range(len(runs)))
    return math.fsum(terms) if runs else 1.0


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "to go on with, or with --detect to look at")
    arguments.add_argument("--detect", action="store_true", help="say how likely such a text is without the watermark")
    arguments.whole("--key", "who knows it finds the watermark", 1, least=0)
    arguments.whole("--max-tokens", default=100)
    args = arguments.parse_args()
    tokens = sym.tokenize(args.text)
    if args.detect:
        print(f"p = {p_value(tokens, args.key, sym.model_info().vocab_size):.3g}")
    else:
        print(sym.detokenize(generate(sym.kv_create(), tokens, args.key, args.max_tokens)))
