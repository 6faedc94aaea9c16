"""Perplexities and the ranks of endings are those of whole rows."""

import math
from statistics import fmean

import pytest

import libsym as sym
from lips import score

pytestmark = pytest.mark.slow
TEXT = "The cat sat on the mat, and the dog sat on the log, and then they both went home to sleep. " * 3


def logprobs(tokens):
    with sym.pred(sym.kv_create(), tokens, rows="all") as dist:
        return [dist[index].logprob(token) for index, token in enumerate(tokens[1:])]


def test_a_files_perplexity_is_e_to_the_mean_surprise(lips, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    tokens = sym.tokenize(TEXT)
    shown = lips.run("score", str(file)).split()
    assert float(shown[0]) == pytest.approx(math.exp(-fmean(logprobs(tokens))), rel=1e-3)
    assert shown[1] == str(len(tokens))
    file.write_text("A short text.")
    assert lips.run("score", str(file), "--context", "2")


def test_a_text_over_the_context_is_scored_in_windows_each_token_once(lips):
    tokens = sym.tokenize(TEXT)[:50]
    found = score.surprises(tokens, 20)
    assert found[:19] == pytest.approx(logprobs(tokens[:20]), abs=1e-4)
    assert found[19:29] == pytest.approx(logprobs(tokens[10:30])[9:], abs=1e-4)
    assert len(found) == 49
    assert found[39:] == pytest.approx(logprobs(tokens[30:50])[9:], abs=1e-4)


def test_endings_are_ranked_by_their_log_probability_after_the_text(lips):
    text, ends = "The capital of France is", [" a dog", " Paris", " Rome"]
    given = len(sym.tokenize(text))
    expected = {end: math.fsum(logprobs(sym.tokenize(text + end))[given - 1 :]) for end in ends}
    found = score.endings(text, ends)
    assert [end for _, _, end in found] == sorted(ends, key=lambda end: -expected[end]) == [" Paris", " Rome", " a dog"]
    assert [total for total, _, _ in found] == pytest.approx(sorted(expected.values(), reverse=True), abs=1e-3)
    first = lips.run("score", "--after", text, *ends).splitlines()[0]
    assert first.endswith("a token  ' Paris'")


def test_an_ending_may_join_the_texts_last_token(lips):
    whole = sym.tokenize("The weath" + "er is fine")
    [(total, _, _)] = score.endings("The weath", ["er is fine"])
    same = len([a for a, b in zip(whole, sym.tokenize("The weath"), strict=False) if a == b])
    assert total == pytest.approx(math.fsum(logprobs(whole)[same - 1 :]), abs=1e-3)
