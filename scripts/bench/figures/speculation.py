"""Savings of speculation: steps, tokens that a grammar forces, entries that the beams of a search share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import libsym as sym
from figures import Row, used
from lips.beam import beam_search
from lips.jacobi import iterate
from lips.ngram import speculate

NUM_TOKENS = 60
TEXTS = {
    "a list": "1, 2, 3, 4, 5, 6,",
    "words that come again": "Count: one, two, three, one, two, three,",
    "code": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "a story": "Once upon a time",
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "born": {"type": "integer"}, "profession": {"type": "string"}},
    "required": ["name", "born", "profession"],
    "additionalProperties": False,
}
PEOPLE = (
    "Ada Lovelace was an English mathematician, born in 1815. Charles Babbage was an engineer, born in 1791. "
    "Give their names, years of birth and professions as JSON."
)
FORMS = {
    "a list of objects": (PEOPLE, sym.Grammar.json({"type": "array", "items": PERSON, "minItems": 2}, compact=True)),
    "a sentence with a date": (
        "When did the Second World War end?",
        sym.Grammar.regex("The identification of the date in question is: [0-9]{4}-[0-9]{2}-[0-9]{2}"),
    ),
    "a sum": (
        "Write the sum of the numbers from 1 to 9.",
        sym.Grammar.lark('start: term (" + " term)* " = " term\nterm: /[1-9][0-9]?/'),
    ),
}


def measure() -> Iterator[Row]:
    for name, text in TEXTS.items():
        yield from _speculation(name, sym.tokenize(text))
    for name, (question, grammar) in FORMS.items():
        yield from _constrained(name, question, grammar)
    yield from _shared()


def _speculation(name: str, prompt: list[int]) -> Iterator[Row]:
    """Measure each way to speculate; fail if its tokens differ from those of greedy decoding."""

    def generated(draft: sym.Ngram | None) -> list[int]:
        kv = sym.kv_create()
        return list(sym.generate(kv, prompt, max_tokens=NUM_TOKENS, stop_at_end=False, draft=draft))

    def by_hand(method: Callable[[sym.KV, list[int]], Iterator[list[int]]]) -> list[int]:
        found = (token for step in method(sym.kv_create(), prompt) for token in step)
        return list(islice(found, NUM_TOKENS))

    greedy, baseline, _ = used(lambda: generated(None))
    ways: dict[str, Callable[[], list[int]]] = {
        "ngram": lambda: by_hand(speculate),
        "ngram --builtin": lambda: generated(sym.Ngram()),
        "jacobi": lambda: by_hand(iterate),
    }
    for program, way in ways.items():
        tokens, steps, computed = used(way)
        if tokens != greedy:
            raise RuntimeError(f"{program}: {name} goes on with other tokens than greedy decoding")
        yield Row(program, f"{name}: {NUM_TOKENS} tokens in", steps, "steps", baseline)
        yield Row(program, f"{name}: computed for them", computed, "tokens", len(prompt) + NUM_TOKENS - 1)


def _constrained(name: str, question: str, grammar: sym.Grammar) -> Iterator[Row]:
    def answer(*, speculate: bool) -> list[int]:
        chat, draft = sym.Chat(sym.kv_create()), sym.Ngram() if speculate else None
        return list(chat.ask(question, grammar=grammar, draft=draft, max_tokens=150))

    tokens, steps, _ = used(lambda: answer(speculate=False))
    yield Row("constrained", f"{name}: {len(tokens)} tokens in", steps, "steps", len(tokens))
    speculated, fewer, _ = used(lambda: answer(speculate=True))
    if speculated != tokens:
        raise RuntimeError(f"constrained: {name} comes out otherwise with speculation")
    yield Row("constrained", f"{name}: {len(tokens)} tokens with --speculate in", fewer, "steps", steps)


def _shared() -> Iterator[Row]:
    """Compare beams and answers that share entries with the same number of beams and answers that share none."""
    prompt, width, length = sym.tokenize("The sun rises in the east and sets in the west. " * 20 + "The sun"), 4, 16
    beams, _, computed = used(lambda: beam_search(sym.kv_create(), prompt, width, length))
    apart = width * (len(prompt) + length - 1)
    what = f"{width} beams of {length} tokens behind {len(prompt)}"
    yield Row("beam", f"{what}: computed", computed, "tokens", apart)
    stats = [sym.kv_stat(beam.kv) for beam in beams]
    pages = sum(stat.exclusive_pages or 0 for stat in stats)
    yield Row("beam", f"{what}: of their own", pages, "pages", sum(stat.pages for stat in stats))
    drawn, _, computed = used(
        lambda: [list(each) for each in sym.generate_n(sym.kv_create(), prompt, width, seed=0, max_tokens=length)]
    )
    apart = sum(len(prompt) + len(answer) - 1 for answer in drawn)
    yield Row(
        "best_of_n", f"{width} answers of {length} tokens behind {len(prompt)}: computed", computed, "tokens", apart
    )
