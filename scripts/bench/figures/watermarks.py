"""Reliability of watermark detection by length of text, beside texts without a watermark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import libsym as sym
from figures import Row
from lips import gumbel, watermark

LENGTHS = [16, 32, 64, 128]
NUM_TEXTS = 24
PROMPTS = ["Once upon a time", "The history of the city begins", "In my opinion,", "A good friend is"]
KEY, DELTA = 7, 2.0
Draw = Callable[[sym.KV, list[int], int], list[int]]


def measure() -> Iterator[Row]:
    """Measure detection. Each text is drawn once, with its own key. Its prefixes serve as shorter texts."""
    size = sym.model_info().vocab_size
    plain = _texts(_plain)
    for program, draw, p_value in (
        ("watermark", _favoured, watermark.p_value),
        ("gumbel", _gumbel, gumbel.p_value),
    ):
        marked = _texts(draw)
        for length in LENGTHS:
            ours, others = (
                [p_value(text[:length], KEY + number, size) for number, text in enumerate(texts) if len(text) >= length]
                for texts in (marked, plain)
            )
            yield Row(program, f"AUC, {length} tokens", auc(ours, others), f"({len(ours)} texts and {len(others)})")
            yield Row(program, f"median p-value, {length} tokens", median(ours), "", median(others))


def auc(marked: list[float], plain: list[float]) -> float:
    """Return the share of pairs in which the marked text has the smaller p-value. Pairs of equal values count half."""
    pairs = [(ours, other) for ours in marked for other in plain]
    return sum((ours < other) + (ours == other) / 2 for ours, other in pairs) / len(pairs)


def _favoured(kv: sym.KV, prompt: list[int], number: int) -> list[int]:
    return watermark.generate(kv, prompt, KEY + number, DELTA, max(LENGTHS), seed=number)


def _gumbel(kv: sym.KV, prompt: list[int], number: int) -> list[int]:
    return gumbel.generate(kv, prompt, KEY + number, max(LENGTHS))


def _plain(kv: sym.KV, prompt: list[int], number: int) -> list[int]:
    return list(sym.generate(kv, prompt, sampler=sym.Sampler(seed=number), max_tokens=max(LENGTHS)))


def _texts(draw: Draw) -> list[list[int]]:
    """Draw texts in threads, so that they share steps."""
    prompts = [sym.tokenize(prompt) for prompt in PROMPTS]

    def text(number: int) -> list[int]:
        with sym.kv_create() as kv:
            return draw(kv, prompts[number % len(prompts)], number)

    with ThreadPoolExecutor(NUM_TEXTS) as threads:
        return list(threads.map(text, range(NUM_TEXTS)))
