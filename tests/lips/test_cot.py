"""Paths begin with the likeliest tokens, and the answer that their confidence adds up for comes first."""

import math

import pytest

import libsym as sym
from lips import cot

pytestmark = pytest.mark.slow
QUESTION = "Tom has 3 apples and buys 2. How many has he?"


def test_each_path_goes_on_greedily_from_one_of_the_likeliest_first_tokens(lips, computed):
    question = sym.chat_tokens([{"role": "user", "content": QUESTION}])
    firsts = sym.pred(sym.kv_create(), question).topk(3)
    found = cot.decode(sym.kv_create(), question, 3, 10)
    for (first, _), path in zip(firsts, found, strict=True):
        greedy = sym.generate(sym.kv_create(), [*question, first], max_tokens=10)
        assert path.text == sym.detokenize([first]) + greedy.full_text()
    _, num_computed = computed(cot.decode, sym.kv_create(), question, 3, 10)
    assert num_computed < len(question) + 3 * (11 + 8 + 12), "the question is computed once"


def test_an_answer_is_as_sure_as_its_tokens_are_ahead_of_the_second_likeliest(lips):
    question = sym.chat_tokens([{"role": "user", "content": QUESTION}])
    [path] = cot.decode(sym.kv_create(), question, 1, 10)
    kv, gaps = sym.kv_create(), []
    first = sym.pred(kv, question).argmax()
    way = sym.generate(kv, [first], max_tokens=10)
    list(way)
    tokens = way.pending + sym.tokenize("\nSo the answer is")
    for _ in range(12):
        dist = sym.pred(kv, tokens)
        (token, best), (_, second) = dist.topk(2)
        if token in sym.model_info().eos_ids or {".", "\n"} & {*sym.detokenize([token])}:
            break
        gaps.append(math.exp(best) - math.exp(second))
        tokens = [token]
    assert path.sureness == pytest.approx(sum(gaps) / len(gaps), abs=1e-3)


def test_a_path_that_has_no_room_for_its_answer_is_shown_and_counts_nothing(tiny):
    question = [97] * (sym.model_info().max_positions - 12)
    found = cot.decode(sym.kv_create(), question, 3, 5)
    assert [(len(path.text), path.answer, path.sureness) for path in found] == [(6, "", 0.0)] * 3


def test_what_paths_are_sure_of_adds_up():
    paths = [cot.Path("", "5", 0.3), cot.Path("", "6", 0.5), cot.Path("", "5", 0.3), cot.Path("", "", 0.9)]
    assert cot.ranked(paths) == [(0.6, "5"), (0.5, "6")]


def test_the_command_shows_the_best_answer_alone(lips):
    options = [QUESTION, "--paths", "3", "--max-tokens", "10"]
    shown = lips.run("cot", *options, "--all").splitlines()
    assert len(shown) > 3
    assert lips.run("cot", *options) == f"{shown[3].partition('  ')[2]}\n"
