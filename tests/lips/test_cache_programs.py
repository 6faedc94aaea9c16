"""Caches of a fixed size: each stays within it, and is about as good as the full cache where a plain window is not."""

import math

import numpy as np
import pytest

import libsym as sym
from lips import h2o, sink, snapkv, tova, windowed
from tests.lips.conftest import LIPS
from tests.lips.test_commands import STORY
from tests.patches import guard

pytestmark = pytest.mark.slow

LICENSE = LIPS.parent / "LICENSE"
BETWEEN = (
    "The wind blew all night, and the sea was grey. In the morning a boat came in with fish and news. "
    "People talked about the weather, about prices, and about the new road over the hill. Nobody was in a hurry. "
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is 68274. Remember it. "
QUESTION = "What is the pass key? The pass key is"
BUDGET = 128


@pytest.fixture
def within(monkeypatch):
    """Has every call that appends look at the length of its file: it is to be at most this."""

    def watch(budget):
        lengths = []
        for module, name in ((sym, "pred"), (sym, "score"), (sym, "generate"), (sym.KV, "write")):
            plain = getattr(module, name)

            def call(kv, tokens, *rest, plain=plain, **how):
                tokens = list(tokens)
                lengths.append(kv.len() + len(tokens) + max(0, (how.get("max_tokens") or 1) - 1))
                assert lengths[-1] <= budget
                return plain(kv, tokens, *rest, **how)

            monkeypatch.setattr(module, name, guard(call))  # a program calls some of them
        return lengths

    return watch


def judge(kv, before, tokens):
    return math.exp(-np.mean(sym.score(kv, [before, *tokens])))


def kept(tokens, entries):
    """A file of some entries of a text, at their positions."""
    kv = sym.kv_create()
    kv.write(tokens)
    kv.keep(entries, rebase=False)
    return kv


def test_perplexity_jumps_when_a_window_loses_the_first_entries_and_does_not_with_sinks(lips, within):
    text = sym.tokenize(LICENSE.read_text())[:320]
    full = sink.perplexity(text, 1024, sinks=0)
    short = text[:BUDGET]
    assert sink.perplexity(short, BUDGET, sinks=0) == sink.perplexity(short, 1024, sinks=0), "nothing went yet"
    lengths = within(BUDGET)
    assert sink.perplexity(text, BUDGET, sinks=0) > 2 * full
    assert sink.perplexity(text, BUDGET, sinks=4) < 1.25 * full
    assert max(lengths) == BUDGET


@pytest.mark.parametrize("num_sinks", [0, 4])
def test_a_window_reads_and_goes_on_within_its_entries_and_its_positions(lips, within, num_sinks):
    prompt, kv, lengths = sym.tokenize(STORY + BETWEEN), sym.kv_create(), within(64)
    drawn = sink.generate(kv, prompt, 64, num_sinks, 40) if num_sinks else windowed.generate(kv, prompt, 64, 40)
    assert len(list(drawn)) == 40
    assert max(lengths) == 64
    tokens, positions = kv.read()
    assert positions == list(range(len(tokens))), "of a text without end, none is beyond the model's context"
    assert (tokens[:4] == prompt[:4]) == bool(num_sinks)


def test_h2o_keeps_the_names_of_a_story_where_the_latest_and_random_entries_do_not_help(lips, within):
    """A story is told, much else comes, and it is told again: the full cache knows the names."""
    told, again = sym.tokenize(STORY + BETWEEN * 6), sym.tokenize(STORY)[:28]
    *before, last = told
    room = BUDGET - len(again) - 1
    drawn = np.sort(np.random.default_rng(0).permutation(np.arange(4, len(before)))[: room - 4])
    full = judge(kept(before, [(0, None)]), last, again)
    latest = judge(kept(before, [(0, 4), (4 - room, None)]), last, again)
    random = judge(kept(before, [*range(4), *drawn.tolist()]), last, again)
    lengths = within(BUDGET)
    assert full < h2o.perplexity(h2o.Cache(BUDGET), told, again) < 0.8 * min(latest, random)
    assert max(lengths) == BUDGET


@pytest.mark.parametrize("program", [h2o, tova])
def test_a_cache_goes_on_within_its_entries(program, lips, within):
    cache = program.Cache(48)
    dist = cache.append(sym.tokenize(STORY + BETWEEN))
    assert cache.kv.len() <= 48
    lengths, draw = [], cache.draw

    def drawn(dist):
        lengths.append(len(np.asarray(dist.attention)))
        return draw(dist)

    cache.draw = drawn
    assert len(list(cache.generate([dist.argmax()], 40))) == 40
    assert max(lengths) == 48
    assert cache.kv.read()[1][0] == 0, "nobody told it that the first entry matters"


@pytest.mark.parametrize("program", [h2o, tova])
def test_no_position_is_used_twice_and_the_loop_ends_where_there_is_none_left(program, tiny):
    cache, room = program.Cache(64), sym.kv_create().room()
    loop = cache.generate([65, *[66] * (room - 200)], 1000)
    positions = [cache.kv.read(-1)[1][0] for _ in loop]
    assert positions == list(range(room - 200, room))
    assert loop.finish == "length"


def test_half_of_what_h2o_keeps_are_the_latest_entries(tiny):
    cache = h2o.Cache(64)
    cache.append(list(range(100)))
    kept = cache.kv.read()[1]
    assert kept[-32:] == list(range(68, 100))


@pytest.mark.parametrize("program", [h2o, tova])
def test_a_cache_that_has_room_says_what_a_file_does(program, lips):
    prompt, file = sym.tokenize("The capital of France is"), sym.kv_create()
    said = sym.generate(file, prompt, max_tokens=8)
    assert list(program.Cache(64).generate(prompt, 8)) == list(said)


def test_tova_and_snapkv_keep_what_a_question_asks_for(lips):
    """A quarter of the prompt is kept. The latest entries of the same number know nothing of the needle."""
    prompt, answer = sym.tokenize(FILLER + NEEDLE + FILLER * 17 + QUESTION), sym.tokenize(" 68274.")
    *before, last = prompt
    full = judge(kept(before, [(0, None)]), last, answer)
    assert judge(kept(before, [(0, 4), (4 - BUDGET, None)]), last, answer) > 5 * full

    small = sym.kv_create()
    snapkv.compress(small, before, BUDGET)
    assert small.len() == BUDGET
    assert judge(small.fork(), last, answer) < 1.5 * full
    assert "68274" in sym.generate(small, [last], max_tokens=8).full_text()

    cache = tova.Cache(BUDGET)
    assert tova.perplexity(cache, prompt, answer) < 1.5 * full
    assert cache.kv.len() <= BUDGET
