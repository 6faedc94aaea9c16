"""Loops of a program's own (`decode`), how likely a text is (`score`), and what they need of files."""

import math

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import libsym as sym

pytestmark = pytest.mark.usefixtures("shared")


def drawing(tokens):
    left = iter(tokens)
    return lambda dist: next(left)


def decode(draw, tokens=(65,), **how):
    return sym.decode(sym.kv_create(), tokens, draw, **how)


def test_a_loop_that_takes_the_likeliest_is_generate():
    tokens, kv = sym.tokenize("Once upon"), sym.kv_create()
    generation = sym.generate(sym.kv_create(), tokens, max_tokens=20)
    decoding = sym.decode(kv, tokens, sym.Dist.argmax, max_tokens=20)
    assert (list(decoding), decoding.finish) == (list(generation), generation.finish)
    assert decoding.pending == generation.pending
    assert kv.read()[0] == [*tokens, *decoding.tokens[:-1]]


async def test_a_loop_in_an_event_loop_may_await_its_draw(backend):
    async def draw(dist):
        await anyio.lowlevel.checkpoint()
        return dist.argmax()

    decoding = await sym.aio.decode(await sym.aio.kv_create(), [65, 66], draw, max_tokens=8)
    assert await decoding.full_text() == sym.generate(sym.kv_create(), [65, 66], max_tokens=8).full_text()


def test_a_loop_ends_where_generate_ends():
    kv, end = sym.kv_create(), min(sym.model_info().eos_ids)
    decoding = sym.decode(kv, [65], drawing(b"one. User: two"), stop=["User:", "never"])
    assert (decoding.full_text(), decoding.finish, decoding.stopped_by) == ("one. ", "stop_text", "User:")
    assert decoding.pending == list(b":")
    assert sym.detokenize(kv.read()[0]) == "Aone. User"
    stopped = decode(drawing([66, end, 67]))
    assert (list(stopped), stopped.finish, stopped.stopped_by, stopped.pending) == ([66], "stop_token", end, [])
    goes_on = decode(drawing([66, end, 67]), stop_at_end=False, stop=67)
    assert (list(goes_on), goes_on.stopped_by) == ([66, end], 67)


def test_contexts_beside_the_file_get_the_same_tokens_in_the_same_steps():
    first, second, seen = sym.kv_create(), sym.kv_create(), []

    def both(dist, other):
        seen.append(np.array(other))
        return 66

    sym.decode(first, [65, 66], both, beside=[(second, [70])], max_tokens=3).full_text()
    assert (first.read()[0], second.read()[0]) == ([65, 66, 66, 66], [70, 66, 66])
    alone = sym.kv_create()
    for given, row in zip(([70], [66], [66]), seen, strict=True):
        assert (np.array(sym.pred(alone, given)) == row).all()


def test_a_loop_ends_in_a_full_context_as_a_generation_does():
    most = sym.model_info().max_positions
    for loop in (lambda kv, tokens: sym.decode(kv, tokens, sym.Dist.argmax), sym.generate):
        kv = sym.kv_create()
        ended = loop(kv, [65] * (most - 3))
        assert (len(list(ended)), ended.finish, kv.room()) == (4, "length", 0)
    full = sym.kv_create("full.kv")
    sym.kv_write(full, [65], most - 2)
    with pytest.raises(sym.Invalid, match=rf"full\.kv: 2 tokens, .* {most} .* 1 more:"):
        decode(lambda dist: 67, beside=[(full, [66, 66])])


def test_a_loop_that_evicts_entries_goes_on_in_the_room_that_it_has_made():
    kv = sym.kv_create()
    room = kv.room()
    kv.write([65] * (room - 2))

    def draw(dist):
        if kv.room() == 0:
            assert len(np.asarray(dist.attention)) == room
            kv.keep([(0, 4), (-20, None)])
        return dist.argmax()

    loop = sym.decode(kv, [65], draw, attention="entries", max_tokens=50)
    assert (len(list(loop)), loop.finish) == (50, "length")
    assert kv.len() == 24 + 48


def test_a_draw_that_fails_leaves_what_was_appended_and_what_makes_no_sense_is_refused():
    def fails(dist):
        raise ZeroDivisionError

    kv = sym.kv_create()
    decoding = sym.decode(kv, [65, 66], fails)
    with pytest.raises(ZeroDivisionError):
        next(decoding)
    assert (kv.len(), decoding.pending) == (2, [])
    for refused, words in (
        (lambda: next(decoding), "the loop is over"),
        (lambda: next(decode(lambda dist: None)), "what draw"),
        (lambda: sym.decode(kv, [65], sym.Dist.argmax, beside=[(kv, [66])]), "each file once"),
        (lambda: next(decode(lambda dist: 10**6)), "not in the vocabulary"),
    ):
        with pytest.raises(sym.Invalid, match=words):
            refused()


def test_a_score_is_what_pred_says_of_each_token():
    tokens, kv, by_hand = [65 + index % 7 for index in range(300)], sym.kv_create(), sym.kv_create()
    scores = sym.score(kv, tokens)
    assert (len(scores), kv.len()) == (299, 300)
    for given, wanted, score in zip(tokens, tokens[1:], scores, strict=False):
        assert score == pytest.approx(sym.pred(by_hand, [given]).logprob(wanted), abs=1e-5)
    assert sym.score(kv, [65]) == []
    assert all(math.isfinite(each) for each in scores)


def test_perplexity_is_that_of_the_mean():
    assert sym.perplexity([-1.0, -3.0]) == pytest.approx(np.exp(2.0))
    assert sym.perplexity([-1e6]) == np.inf
    with pytest.raises(sym.Invalid):
        sym.perplexity([])


def test_opening_to_append_creates_what_is_not_there(shared):
    with sym.kv_open("log.kv", "a") as kv:
        assert (kv.writable, sym.kv_write(kv, [1, 2])) == (True, 2)
    assert sym.kv_open("log.kv", "a").len() == 2
    with pytest.raises(sym.NotFound):
        sym.kv_open("none/log.kv", "a")
    (shared.mount / "dangling.kv").symlink_to("nowhere.kv")
    with pytest.raises((sym.Exists, sym.NotFound)):
        sym.kv_open("dangling.kv", "a")
