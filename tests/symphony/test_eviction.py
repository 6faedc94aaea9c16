"""Eviction by score on the real model, as a program does it with `attention=` and `kv_extract`: a needle is kept."""

import heapq

import pytest

import libsym as sym

pytestmark = pytest.mark.slow  # the real model

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is 68274. Remember it. "
FIRST = 4
"""Entries that models look at when they look at nothing: they are kept whatever their mass."""


@pytest.fixture
def connected(start_daemon, monkeypatch):
    daemon = start_daemon("--model", "smollm2", "--kv-memory", "128M")
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    sym.connect(str(daemon.socket))
    yield
    sym.daemon_check()
    sym.close()


def answer(kv, question):
    tokens, found = question, []
    for _ in range(8):
        tokens = [sym.pred(kv, tokens).argmax()]
        found += tokens
    return sym.detokenize(found)


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("depth", [5, 12])
def test_a_quarter_of_a_context_that_is_kept_by_what_a_question_attends_to_has_the_answer(depth):
    context = sym.tokenize(FILLER * depth + NEEDLE + FILLER * (24 - depth))
    question = sym.tokenize("What is the pass key? The pass key is")
    base = sym.kv_create()
    sym.kv_write(base, context)
    with sym.kv_fork(base) as probe:  # SnapKV: the window that observes is the question
        mass = sym.pred(probe, question, attention="entries").attention.mass()

    entries, budget = range(FIRST, len(context)), len(context) // 4
    kept = {
        "most": heapq.nlargest(budget, entries, key=mass.__getitem__),
        "least": heapq.nsmallest(budget, entries, key=mass.__getitem__),
        "latest": list(entries[-budget:]),
    }
    answers = {}
    for name, some in kept.items():
        ranges = [(entry, entry + 1) for entry in (*range(FIRST), *sorted(some))]
        answers[name] = answer(sym.kv_extract(base, ranges, rebase=False), question)
    assert "68274" in answer(sym.kv_fork(base), question)
    assert "6827" in answers["most"]
    assert "6827" not in answers["least"]
    assert "6827" not in answers["latest"]
