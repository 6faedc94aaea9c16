"""Attention of `pred` over a daemon: its numbers, its forms, its limits, and what programs keep by it."""

from typing import Any

import anyio
import numpy as np
import pytest

import libsym as sym

pytestmark = pytest.mark.usefixtures("shared")

HEADS, LAYERS, KV_HEADS = 4, 2, 2  # of the tiny model
PROMPT = list(b"Attention is a sum of weights, and they are one for each token, head and layer.")
LONG = [number * 7 % 256 for number in range(4000)]


def file(tokens=()):
    kv = sym.kv_create()
    if len(tokens):
        sym.kv_write(kv, tokens)
    return kv


def attention(kv, tokens, to="entries", **how):
    return sym.pred(kv, tokens, attention=to, **how).attention


# ---- the numbers


def test_each_token_gives_one_by_each_head_and_nothing_to_what_comes_after():
    mass = np.asarray(attention(file(PROMPT), [1, 2, 3], by="layer"))
    assert mass.shape == (LAYERS, KV_HEADS, len(PROMPT) + 3)
    assert np.allclose(mass.sum(axis=2), 3 * HEADS / KV_HEADS, rtol=1e-5)
    kv = file(PROMPT)
    first, then = (np.asarray(attention(kv, tokens, by="layer")) for tokens in ([1], [2, 3]))
    assert np.allclose(mass[:, :, : len(PROMPT) + 1], first + then[:, :, : len(PROMPT) + 1], atol=1e-5)
    assert (then[:, :, -1] < mass.sum() / 3).all()


def test_sums_and_pages_are_those_of_the_entries_by_layer():
    by_layer = np.asarray(attention(file(PROMPT), [1, 2, 3], by="layer"))
    pages = np.pad(by_layer, ((0, 0), (0, 0), (0, 96 - by_layer.shape[2]))).reshape(LAYERS, KV_HEADS, 3, 32).sum(axis=3)
    for how, expected in (
        ({}, by_layer.sum(axis=(0, 1))),
        ({"to": "pages", "by": "layer"}, pages),
        ({"to": "pages"}, pages.sum(axis=(0, 1))),
    ):
        asked = attention(file(PROMPT), [1, 2, 3], **how)
        assert (asked.shape, asked.num_entries) == (expected.shape, len(PROMPT) + 3)
        assert np.allclose(np.asarray(asked), expected, rtol=1e-5)


def test_a_prompt_that_is_cut_into_steps_has_the_bits_of_one_that_others_cut_elsewhere():
    async def decode_beside():
        async with await sym.aio.kv_create() as kv:
            for token in range(40):
                await sym.aio.pred(kv, [token])

    alone = attention(file(), LONG[:1500])
    with anyio.from_thread.start_blocking_portal() as portal:
        others = [portal.start_task_soon(decode_beside) for _ in range(3)]
        beside = attention(file(), LONG[:1500])
        for other in others:
            other.result()
    assert bytes(alone.values) == bytes(beside.values)
    assert sum(alone.mass()) == pytest.approx(1500 * HEADS * LAYERS, rel=1e-4)


# ---- the rest of the call


@pytest.mark.parametrize("how", [{}, {"rows": "all"}, {"mask": [True] * len(PROMPT)}, {"positions": 100}])
def test_a_call_that_asks_has_the_bits_of_one_that_does_not(how):
    plain, asked = file(PROMPT), file(PROMPT)
    dist, dist_asked = sym.pred(plain, LONG[:200], **how), sym.pred(asked, LONG[:200], attention="pages", **how)
    assert np.asarray(dist).tobytes() == np.asarray(dist_asked).tobytes()
    assert plain.read() == asked.read()
    assert bytes(sym.pred(plain, [1]).logits) == bytes(sym.pred(asked, [1], attention="entries").logits)


def test_a_loop_may_ask_now_and_then():
    plain, asking, tokens = file(PROMPT), file(PROMPT), [5]
    for step in range(12):
        dist = sym.pred(asking, tokens, attention="entries" if step % 3 == 2 else None)
        tokens = [sym.pred(plain, tokens).argmax()]
        assert dist.argmax() == tokens[0]
        if step % 3 == 2:
            assert dist.attention.num_entries == len(asking) == len(PROMPT) + step + 1
            assert sum(dist.attention.mass()) == pytest.approx(HEADS * LAYERS, rel=1e-5)


def test_attention_comes_with_rows_that_are_answered_by_numbers():
    both = sym.pred(file(PROMPT), [1, 2], top_k=3, logprobs=[7], rows="all", attention="entries", by="layer")
    reduced = sym.pred(file(PROMPT), [1, 2], top_k=3, logprobs=[7], rows="all")
    assert [row.topk(3) for row in both] == [row.topk(3) for row in reduced]
    assert both.logprob(7) == reduced.logprob(7)
    assert bytes(both.attention.values) == bytes(attention(file(PROMPT), [1, 2], by="layer").values)


def test_calls_of_a_batch_ask_each_for_itself():
    asked: list[dict[str, Any]] = [{}, {"attention": "pages"}, {"attention": "entries", "by": "layer"}]
    asked.append({"attention": "entries", "top_k": 2})
    dists = sym.pred_batch([sym.Pred(file(PROMPT), [1, 2, index], **how) for index, how in enumerate(asked)])
    with pytest.raises(sym.Invalid, match="no attention"):
        _ = dists[0].attention
    for index, dist in enumerate(dists[1:], 1):
        alone = sym.pred(file(PROMPT), [1, 2, index], **asked[index])
        assert bytes(dist.attention.values) == bytes(alone.attention.values)
        assert dist.argmax() == alone.argmax()


# ---- the object


def test_rows_are_views_and_sums_are_added_up():
    found = attention(file(PROMPT), [1, 2], by="layer")
    whole = np.asarray(found)
    assert np.array_equal(found.mass(1, 0), whole[1, 0])
    assert np.shares_memory(np.asarray(found.mass(1, 0)), whole)
    for mass, axis, of in ((found.mass(layer=1), 0, whole[1]), (found.mass(head=1), 0, whole[:, 1])):
        assert np.allclose(mass, of.sum(axis=axis), rtol=1e-6)
    assert np.allclose(found.mass(), whole.sum(axis=(0, 1)), rtol=1e-6)
    assert found.values.readonly
    assert repr(found) == f"<Attention to {len(PROMPT) + 2} entries by 2 layers and 2 KV heads>"


def test_what_can_not_be_asked_for_is_invalid_and_nothing_is_appended():
    kv = file()
    for how, words in (
        ({"attention": "words"}, "attention='words'"),
        ({"attention": 1}, "attention=1"),
        ({"attention": "pages", "by": "head"}, "by='head'"),
        ({"by": "layer"}, "give attention="),
    ):
        with pytest.raises(sym.Invalid, match=words):
            sym.pred(kv, [1], **how)
    assert len(kv) == 0
    with pytest.raises(sym.Invalid, match="layer=2"):
        attention(file(), [1], by="layer").mass(2)
    with pytest.raises(sym.Invalid, match="by='layer'"):
        attention(file(), [1], "pages").mass(0)


# ---- limits


def test_numbers_that_fit_no_message_are_too_large_and_pages_do():
    assert ((1 << 20) - 80) // (4 * LAYERS * KV_HEADS) < 17 * 4000, "entries by layer"
    merged = sym.kv_merge([file(LONG)] * 17, rebase=False)
    with pytest.raises(sym.TooLarge, match="ask for pages, or for the sum"):
        attention(merged, [1], positions=0, by="layer")
    assert len(merged) == 17 * 4000
    assert attention(merged, [1], "pages", positions=0, by="layer").shape[2] == 17 * 125 + 1
    assert attention(merged, [1], positions=0).num_entries == 17 * 4000 + 2


def test_calls_of_a_batch_that_fit_no_message_together_fail_alone():
    whole = file(LONG)
    kvs = [whole.fork() for _ in range(20)]
    preds = [sym.Pred(kv, [1], positions=0, attention="entries", by="layer") for kv in kvs]
    with pytest.raises(sym.BatchFailed) as failed:
        sym.pred_batch(preds)
    outcomes = failed.value.results
    refused = [outcome for outcome in outcomes if isinstance(outcome, sym.TooLarge)]
    assert 0 < len(refused) < 10
    assert all("ask for less at once" in str(outcome) for outcome in refused)
    assert all(outcome.attention.num_entries == 4001 for outcome in outcomes if outcome not in refused)
    assert [len(kv) for kv in kvs] == [4000 + (outcome not in refused) for outcome in outcomes]


# ---- eviction by score, which programs do with kv_extract
