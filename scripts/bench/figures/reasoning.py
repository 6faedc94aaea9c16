"""Savings when branches are forks: tokens that are not computed again, and steps that branches share.

Without forks a branch would prefill the text before it. Without sharing each branch would need its own steps. Both
baselines are computed from counts of the same run, so they are exact, and no second run is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import libsym as sym
from figures import Row
from lips import graph_of_thought, mcts, self_consistency, skeleton_of_thought, tree_of_thought

T = TypeVar("T")
QUESTION = "A farmer has 12 hens. Each lays 5 eggs a week, and he sells 40 eggs. How many eggs are left? Think first."


def spent(call: Callable[[], T]) -> tuple[T, int, int]:
    """Return the call's result, its computed tokens and the daemon's steps during the call.

    No other program may call the daemon.
    """
    tokens, steps = sym.getrusage().tokens, sym.daemon_stat()["num_steps"]
    result = call()
    return result, sym.getrusage().tokens - tokens, sym.daemon_stat()["num_steps"] - steps


def measure() -> Iterator[Row]:
    yield from of_tree_of_thought()
    yield from of_graph_of_thought()
    yield from of_skeleton_of_thought()
    yield from of_self_consistency()
    yield from of_mcts()


def of_tree_of_thought() -> Iterator[Row]:
    root = tree_of_thought.Thought(sym.kv_create())
    task = sym.tokenize(
        "Task: Plan a day in a city. It rains, and there are two children with you.\nA plan in 3 steps."
    )
    root.kv.write(task[:-1])
    root.pending = task[-1:]
    lengths = list[int]()
    fork = tree_of_thought.Thought.fork

    def counting(node: tree_of_thought.Thought) -> tree_of_thought.Thought:
        lengths.append(node.kv.len())
        return fork(node)

    tree_of_thought.Thought.fork = counting  # type: ignore[assignment,method-assign]
    try:
        _, tokens, steps = spent(lambda: tree_of_thought.think(root, breadth=4, keep=2, depth=3))
    finally:
        tree_of_thought.Thought.fork = fork  # type: ignore[method-assign]
    # A thought is generated in one fork and judged in another. Without forks, generation and judgement would each
    # prefill the text before the thought.
    yield Row(
        "tree_of_thought", "tokens computed, 20 thoughts in 3 levels", tokens, "tokens", tokens + 2 * sum(lengths)
    )
    drawn = tokens - 20 * (len(sym.tokenize(tree_of_thought.JUDGE)) + 6)
    yield Row("tree_of_thought", "steps, beside one for each token drawn", steps, "steps", drawn)


def of_graph_of_thought() -> Iterator[Row]:
    digits = [5, 3, 9, 1, 7, 2, 8, 4]
    with sym.kv_create() as examples:
        examples.write(sym.tokenize(graph_of_thought.SORT.partition("{")[0]))
        for ways in (1, 6):
            found, tokens, _ = spent(lambda ways=ways: graph_of_thought.sort(examples, digits, ways))  # type: ignore[misc]
            faults = graph_of_thought.faults(digits, found)
            yield Row("graph_of_thought", f"faults of 8 sorted digits, {ways} ways", faults, "faults")
        attempts = 6 * (2 + 1)
        what = "tokens computed, 18 attempts on forks of the examples"
        yield Row("graph_of_thought", what, tokens, "tokens", tokens + attempts * examples.len())


def of_skeleton_of_thought() -> Iterator[Row]:
    with sym.kv_create() as kv:
        question = "How do I plant a tree?"
        points, _, steps = spent(lambda: list(skeleton_of_thought.answer(kv, question, 4, 60)))
        in_order = kv.len() + sum(len(sym.tokenize(text)) for _, text in points)
    yield Row("skeleton_of_thought", "steps for 4 points, beside one for each token", steps, "steps", in_order)


def of_self_consistency() -> Iterator[Row]:
    question = sym.chat_tokens([{"role": "user", "content": QUESTION}])
    with sym.kv_create() as kv:
        kv.write(question[:-1])
        ways: dict[str, Any] = {"temperature": 0.7, "seed": 0, "max_tokens": 64}
        _, tokens, steps = spent(lambda: self_consistency.votes(sym.generate_n(kv, question[-1:], 8, **ways)))
    yield Row("self_consistency", "tokens computed for 8 ways", tokens, "tokens", tokens + 7 * (len(question) - 1))
    yield Row("self_consistency", "steps for 8 ways, beside one for each token", steps, "steps", tokens)


def of_mcts() -> Iterator[Row]:
    found, drawn = 0, 0
    for seed in range(4):
        search, budget = mcts.Search(61, seed), sym.Budget(tokens=600)
        while budget and search.best[0] < 1:
            search.step()
        found += search.best[0] == 1
        chance, budget = mcts.Search(61, seed), sym.Budget(tokens=600)
        while budget and chance.best[0] < 1:
            chance.rollout(chance.root)
        drawn += chance.best[0] == 1
    yield Row("mcts", "of 4 searches, beside draws: 61 within 600 tokens", found, "found", drawn)
