"""Watermark: favours half of the tokens, chosen by a key; --detect tests a text for the mark.

    symphony run watermark "Once upon a time" --key 7 --max-tokens 100
    symphony run watermark --key 7 --detect "a text that may have been drawn so"

A key and the previous token choose half of the vocabulary; the logits of this half rise by `delta` before the draw.
The test needs the key and the text, but no model. By chance half of the tokens are favoured, so an excess of favoured
tokens gives a p-value. (Kirchenbauer et al. 2023)
"""

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt

import libsym as sym

GREEN = 0.5


def green(key: int, before: int, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the tokens that are favoured after the token `before`."""
    return np.random.default_rng((key, before)).random(vocab_size) < GREEN


def generate(kv: sym.KV, prompt: list[int], key: int, delta: float, max_tokens: int, seed: int) -> list[int]:
    context, draws = list(prompt), sym.Sampler(seed=seed).start()

    def draw(dist: sym.Dist) -> int:
        favour = delta * green(key, context[-1], dist.vocab_size)
        context.append(draws.draw(sym.Dist.of(np.asarray(dist) + favour)))
        return context[-1]

    return list(sym.decode(kv, prompt, draw, max_tokens=max_tokens))


def p_value(tokens: list[int], key: int, vocab_size: int) -> float:
    """Return the probability of so many favoured tokens without the watermark. Each repeated pair counts once."""
    pairs = set(pairwise(tokens))
    num_green = sum(bool(green(key, before, vocab_size)[token]) for before, token in pairs)
    z = (num_green - GREEN * len(pairs)) / math.sqrt(max(1, len(pairs)) * GREEN * (1 - GREEN))
    return 0.5 * math.erfc(z / math.sqrt(2))


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "to go on with, or with --detect to look at")
    arguments.add_argument("--detect", action="store_true", help="say how likely such a text is without the watermark")
    arguments.whole("--key", "the secret of the watermark", 1, least=0)
    arguments.number("--delta", "the favour, in logits", 3.0, least=0, most=1000)
    arguments.whole("--max-tokens", default=100)
    arguments.whole("--seed", "of the draws", 0, least=0)
    args = arguments.parse_args()
    tokens = sym.tokenize(args.text)
    if args.detect:
        print(f"p = {p_value(tokens, args.key, sym.model_info().vocab_size):.3g}")
    else:
        print(sym.detokenize(generate(sym.kv_create(), tokens, args.key, args.delta, args.max_tokens, args.seed)))
