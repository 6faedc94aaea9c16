"""Best-of-n computes the question once, and shows the answer that has the best score."""

from statistics import fmean

import pytest

import libsym as sym
from lips.best_of_n import JUDGE

pytestmark = pytest.mark.slow
QUESTION = "Why is the sky blue?"
OPTIONS = ["-n", "3", "--max-tokens", "12", "--temperature", "0.8"]


def draws() -> list[list[int]]:
    """Return the answers that the command draws with these options."""
    question = sym.chat_tokens([{"role": "user", "content": QUESTION}])
    drawn = sym.generate_n(sym.kv_create(), question, 3, temperature=0.8, seed=0, max_tokens=12)
    return [list(each) for each in drawn]


def likelihood(answer: list[int]) -> float:
    """The mean log-probability of an answer's tokens behind the question, from whole rows."""
    *question, last = sym.chat_tokens([{"role": "user", "content": QUESTION}])
    kv = sym.kv_create()
    kv.write(question)
    with sym.pred(kv, [last, *answer], rows="all") as dist:
        return fmean(dist[index].logprob(token) for index, token in enumerate(answer))


def test_it_shows_the_answer_that_is_likeliest_on_average(lips):
    answers = draws()
    best = max(answers, key=likelihood)
    assert lips.run("best_of_n", QUESTION, *OPTIONS) == f"{sym.detokenize(best)}\n"
    shown = [line.partition("] ") for line in lips.run("best_of_n", QUESTION, *OPTIONS, "--all").splitlines()]
    ranked = sorted(answers, key=likelihood, reverse=True)
    assert [text for _, _, text in shown] == [sym.detokenize(answer) for answer in ranked]
    assert [float(score[1:]) for score, _, _ in shown] == pytest.approx([likelihood(each) for each in ranked], abs=1e-3)


def test_a_judge_ranks_by_how_surely_the_model_says_yes(lips):
    def verdict(answer: list[int]) -> float:
        asked = JUDGE.format(question=QUESTION, answer=sym.detokenize(answer))
        dist = sym.pred(sym.kv_create(), sym.chat_tokens([{"role": "user", "content": asked}]))
        return dist.logits[sym.tokenize("Yes")[0]] - dist.logits[sym.tokenize("No")[0]]

    best = max(draws(), key=verdict)
    assert lips.run("best_of_n", QUESTION, *OPTIONS, "--judge") == f"{sym.detokenize(best)}\n"
