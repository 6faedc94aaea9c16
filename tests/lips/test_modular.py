"""Texts that are computed apart and joined: the tokens saved, and the cost in KL."""

import math

import pytest

import libsym as sym
from lips import modular

pytestmark = pytest.mark.slow
TEXTS = ["Bees make honey. They live in hives and eat nectar.", "Ants live in hills. They do not make honey."]
QUESTION = "Who makes honey?"


@pytest.fixture
def head(lips):
    sym.kv_mkdir("modules", parents=True)
    with sym.kv_create("modules/head.kv") as kv:
        kv.write(sym.chat_tokens([modular.SYSTEM], add_generation_prompt=False))
        yield kv


def test_one_module_that_is_joined_is_what_is_computed_at_once(head):
    """The module has seen everything before it, so joining loses nothing."""
    found = modular.compare([head, modular.open_module(head, TEXTS[0])], QUESTION, 8)
    assert found.kl == pytest.approx(0, abs=1e-9)
    assert found.answer == found.recomputed


def test_modules_that_have_not_seen_each_other_cost_something_and_far_less_than_their_absence(head):
    files = [head, *(modular.open_module(head, text) for text in TEXTS)]
    joined = modular.compare(files, QUESTION, 8)
    # What one would have to guess: the recomputed answer by a model that was not given the texts at all.
    tail = modular.after_system(QUESTION, asks=True)
    with sym.kv_merge(files) as order, sym.kv_create() as whole, head.fork() as blind:
        whole.write(order.read()[0])
        forced = tail + sym.generate(whole.fork(), tail, max_tokens=8).tokens[:-1]
        kl = 0.0
        first, other = sym.pred(whole, forced, rows="all"), sym.pred(blind, forced, rows="all")
        for row in range(len(tail) - 1, len(forced)):
            pairs = zip(first[row].probs(), other[row].probs(), strict=True)
            kl += sum(p * math.log(p / q) for p, q in pairs if p > 0) / (len(forced) - len(tail) + 1)
    assert 1e-4 < joined.kl < kl / 2


def test_a_module_is_computed_once_and_a_combination_computes_the_question_alone(head, computed):
    modules, num_first = computed(lambda: [modular.open_module(head, text) for text in TEXTS])
    again, num_again = computed(lambda: [modular.open_module(head, text) for text in TEXTS])
    assert (num_first, num_again) == (sum(kv.len() for kv in modules), 0)
    assert [kv.read() for kv in again] == [kv.read() for kv in modules]
    joined, num_joining = computed(sym.kv_merge, [head, *reversed(modules)])
    assert num_joining == 0
    texts = [{"role": "user", "content": text} for text in reversed(TEXTS)]
    assert joined.read()[0] == sym.chat_tokens([modular.SYSTEM, *texts], add_generation_prompt=False)
    assert joined.read()[1] == list(range(joined.len()))
    found = modular.compare([head, *modules], QUESTION, 2)
    assert found.num_computed == len(modular.after_system(QUESTION, asks=True))
    assert found.num_joined == head.len() + num_first


def test_a_file_that_is_named_twice_is_joined_twice(tiny, tmp_path):
    (tmp_path / "bees.md").write_text(TEXTS[0])
    file = str(tmp_path / "bees.md")
    assert tiny.run("modular", "--max-tokens", "2", "Who?", file, file).startswith("bees.md + bees.md: ")


def test_each_combination_is_told_with_what_it_cost(lips, tmp_path):
    for number, text in enumerate([*TEXTS, "Wasps build nests of paper."]):
        (tmp_path / f"{number}.md").write_text(text)
    files = [str(tmp_path / f"{number}.md") for number in range(3)]
    told = lips.run("modular", "--choose", "2", "--max-tokens", "3", QUESTION, *files)
    assert [line.partition(":")[0] for line in told.splitlines() if ".md" in line] == [
        "0.md + 1.md",
        "0.md + 2.md",
        "1.md + 2.md",
    ]
    assert told.count("nats a token; ") == 3
