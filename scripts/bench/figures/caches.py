"""Savings of programs that keep KV: tokens not computed again, the cost of joined files, hits of a program's own cache.

The texts are paragraphs of docstrings of the modules in kvfs.
"""

from __future__ import annotations

import ast
import io
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from itertools import combinations
from pathlib import Path

import libsym as sym
from figures import Row, used
from lips import modular, prefix, prefix_tree, rag

ROOT = Path(__file__).resolve().parents[3]
QUERIES = ["What is a fork?", "What is a page?", "Who computes?", "What is kept?", "Where is it?", "How many?"]
NUM_DOCUMENTS = 12
NUM_QUESTIONS = 80
NUM_KEPT = 4
"""Number of documents that fit the budget of `rag`."""


def paragraphs(least_chars: int = 250) -> list[str]:
    """Return paragraphs of module docstrings that are long enough to be documents."""
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "kvfs").rglob("*.py"))]
    texts = [ast.get_docstring(ast.parse(source)) or "" for source in sources]
    return [part for text in texts for part in text.split("\n\n") if len(part) >= least_chars and part[0].isalpha()]


def computed(call: Callable[[], object]) -> int:
    return used(call)[2]


def measure() -> Iterator[Row]:
    yield from of_prefix()
    yield from of_prefix_tree()
    yield from of_modular()
    yield from of_rag()


def of_prefix() -> Iterator[Row]:
    def ask(base: sym.KV) -> None:
        with redirect_stdout(io.StringIO()):
            for query in QUERIES:
                prefix.answer(base, query, 1)

    with sym.kv_create() as empty:
        num_without = computed(lambda: ask(empty))
    num_with = computed(lambda: ask(prefix.open_prefix()))
    yield Row("prefix", f"tokens computed for {len(QUERIES)} questions", num_with, "tokens", num_without)


def of_prefix_tree() -> Iterator[Row]:
    documents, system = paragraphs()[:3], "You answer in one short sentence."
    levels = [
        prefix_tree.level("system", [(system, system)]),
        prefix_tree.level("user", [("document", text) for text in documents]),
        prefix_tree.level("user", [(query, query) for query in QUERIES[:4]]),
    ]

    def grow() -> None:
        with sym.kv_open("figures.kv", "a") as root:
            for _, answer in list(prefix_tree.grow(root, [], levels, "figures", 1)):
                answer.full_text()

    num_with = computed(grow)
    num_without = sum(
        len(sym.chat_tokens([{"role": role, "content": text} for role, text in messages]))
        for document in documents
        for query in QUERIES[:4]
        for messages in [[("system", system), ("user", document), ("user", query)]]
    )
    yield Row("prefix_tree", "tokens computed for 3 documents x 4 questions", num_with, "tokens", num_without)
    num_again = computed(grow)
    yield Row("prefix_tree", "the same, when the tree is there", num_again, "tokens", num_without)


def of_modular() -> Iterator[Row]:
    texts, kls, num_joined, num_computed = paragraphs()[:3], list[float](), 0, 0
    sym.kv_mkdir("modules", parents=True)
    with sym.kv_open_or_compute(
        "modules/head.kv", sym.chat_tokens([modular.SYSTEM], add_generation_prompt=False)
    ) as head:
        modules = [modular.open_module(head, text) for text in texts]
        for chosen in combinations(modules, 2):
            found = modular.compare([head, *chosen], "What do the two texts say?", 16)
            kls.append(found.kl)
            num_joined += found.num_joined
            num_computed += found.num_computed
        num_modules = head.len() + sum(module.len() for module in modules)
    mean = sum(kls) / len(kls)
    yield Row("modular", "mean KL of 2 joined texts to recomputed, along the answer", mean, "nats")
    num_with, num_without = num_modules + num_computed, num_joined + num_computed
    yield Row("modular", "tokens computed for the 3 pairs of 3 texts", num_with, "tokens", num_without)


def of_rag() -> Iterator[Row]:
    """Measure `rag` with Zipf's law: there are 1/n as many questions about the n-th document as about the first."""
    texts = paragraphs()[:NUM_DOCUMENTS]
    documents = {f"{number}.md": text for number, text in enumerate(texts)}
    weights = [1 / number for number in range(1, len(documents) + 1)]
    asked = random.Random(7).choices(list(documents), weights, k=NUM_QUESTIONS)
    lengths = {
        name: len(sym.chat_tokens([rag.under(text)], add_generation_prompt=False)) for name, text in documents.items()
    }
    shelf = rag.Shelf("rag/figures", NUM_KEPT * max(lengths.values()))
    num_hits = 0
    for name in asked:
        num_hits += computed(partial(open_and_tidy, shelf, documents, name)) == 0
    what = f"of {NUM_QUESTIONS} questions on {len(documents)} documents, hits with room for {NUM_KEPT} long ones"
    yield Row("rag", f"{what}; without: LRU", num_hits / NUM_QUESTIONS, "share", lru_hits(asked, lengths, shelf.budget))


def open_and_tidy(shelf: rag.Shelf, documents: dict[str, str], name: str) -> None:
    with shelf.take(name, documents[name]) as kv:
        shelf.tidy(documents, kv)


def lru_hits(asked: list[str], lengths: dict[str, int], budget: int) -> float:
    """Return the hit rate of an LRU cache for the same questions."""
    kept, num_hits = OrderedDict[str, int](), 0
    for name in asked:
        num_hits += name in kept
        kept[name] = lengths[name]
        kept.move_to_end(name)
        while sum(kept.values()) > budget:
            kept.popitem(last=False)
    return num_hits / len(asked)
