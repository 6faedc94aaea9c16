"""Attention of `pred` over a daemon: its numbers, its forms, its limits, and caches that programs keep by it."""

import heapq

import anyio
import numpy as np
import pytest

import libsym as sym
from libsym.abi import ATTENTION, ROWS_LAST, Op
from libsym.channel.scripts import Call
from libsym.rows.attention import attention_block

pytestmark = pytest.mark.usefixtures("connected")

HEADS, LAYERS, KV_HEADS = 4, 2, 2  # of the tiny model
PROMPT = list(b"Attention is a sum of weights, and they are one for each token, head and layer.")


def file(tokens=()):
    kv = sym.kv_create()
    if len(tokens):
        sym.kv_write(kv, tokens)
    return kv


def layers_of(kv, tokens, **how):
    return np.asarray(sym.pred(kv, tokens, attention="entries", by="layer", **how).attention)


def tokens_of(count):
    return [number * 7 % 256 for number in range(count)]


# ---- the numbers


def test_each_token_gives_one_by_each_head_and_nothing_to_what_comes_after():
    mass = layers_of(file(PROMPT), [1, 2, 3])
    assert mass.shape == (LAYERS, KV_HEADS, len(PROMPT) + 3)
    assert np.allclose(mass.sum(axis=2), 3 * HEADS / KV_HEADS, rtol=1e-5)
    first, then = layers_of(kv := file(PROMPT), [1]), layers_of(kv, [2, 3])
    assert np.allclose(mass[:, :, : len(PROMPT) + 1], first + then[:, :, : len(PROMPT) + 1], atol=1e-5)
    assert (then[:, :, -1] < mass.sum() / 3).all()


def test_sums_and_pages_are_those_of_the_entries_by_layer():
    by_layer = layers_of(file(PROMPT), [1, 2, 3])
    summed = np.asarray(sym.pred(file(PROMPT), [1, 2, 3], attention="entries").attention)
    assert np.allclose(summed, by_layer.sum(axis=(0, 1)), rtol=1e-5)
    padded = np.zeros((LAYERS, KV_HEADS, 96), np.float32)
    padded[:, :, : by_layer.shape[2]] = by_layer
    pages = padded.reshape(LAYERS, KV_HEADS, 3, 32).sum(axis=3)
    asked = sym.pred(file(PROMPT), [1, 2, 3], attention="pages", by="layer").attention
    assert asked.shape == (LAYERS, KV_HEADS, 3)
    assert asked.num_entries == len(PROMPT) + 3
    assert np.allclose(np.asarray(asked), pages, rtol=1e-5)
    asked = sym.pred(file(PROMPT), [1, 2, 3], attention="pages").attention
    assert np.allclose(np.asarray(asked), pages.sum(axis=(0, 1)), rtol=1e-5)


def test_a_prompt_that_is_cut_into_steps_has_the_bits_of_one_that_others_cut_elsewhere():
    tokens = tokens_of(1500)
    alone = sym.pred(file(), tokens, attention="entries").attention
    kv = file()
    with anyio.from_thread.start_blocking_portal() as portal:
        others = [portal.start_task_soon(decode_beside) for _ in range(3)]
        beside = sym.pred(kv, tokens, attention="entries").attention
        for other in others:
            other.result()
    assert bytes(alone.values) == bytes(beside.values)
    assert sum(alone.mass()) == pytest.approx(1500 * HEADS * LAYERS, rel=1e-4)


async def decode_beside():
    async with await sym.aio.kv_create() as kv:
        for token in range(40):
            await sym.aio.pred(kv, [token])


def test_what_a_mask_hides_has_no_mass():
    mask = [number % 3 == 0 for number in range(len(PROMPT))]
    mass = sym.pred(file(PROMPT), [1, 2], mask=mask, attention="entries").attention.mass()
    assert all((mass[index] > 0) == seen for index, seen in enumerate(mask))
    assert min(mass[-2:]) > 0


# ---- the rest of the call


@pytest.mark.parametrize("how", [{}, {"rows": "all"}, {"mask": [True] * len(PROMPT)}, {"positions": 100}])
def test_a_call_that_asks_has_the_bits_of_one_that_does_not(how):
    tokens = tokens_of(200)
    plain, asked = file(PROMPT), file(PROMPT)
    dist, dist_asked = sym.pred(plain, tokens, **how), sym.pred(asked, tokens, attention="pages", **how)
    assert np.asarray(dist).tobytes() == np.asarray(dist_asked).tobytes()
    assert plain.read() == asked.read()
    assert bytes(sym.pred(plain, [1]).logits) == bytes(sym.pred(asked, [1], attention="entries").logits)


def test_a_loop_may_ask_now_and_then():
    plain, asking = file(PROMPT), file(PROMPT)
    tokens, tokens_asked = [5], [5]
    for step in range(12):
        tokens = [sym.pred(plain, tokens).argmax()]
        how = {"attention": "entries"} if step % 3 == 2 else {}
        dist = sym.pred(asking, tokens_asked, **how)
        tokens_asked = [dist.argmax()]
        if how:
            assert dist.attention.num_entries == len(asking) == len(PROMPT) + step + 1
            assert sum(dist.attention.mass()) == pytest.approx(HEADS * LAYERS, rel=1e-5)
        assert tokens == tokens_asked


def test_it_comes_with_rows_that_are_answered_by_numbers():
    both = sym.pred(file(PROMPT), [1, 2], top_k=3, logprobs=[7], rows="all", attention="entries", by="layer")
    reduced = sym.pred(file(PROMPT), [1, 2], top_k=3, logprobs=[7], rows="all")
    assert [row.topk(3) for row in both] == [row.topk(3) for row in reduced]
    assert both.logprob(7) == reduced.logprob(7)
    assert np.array_equal(np.asarray(both.attention), layers_of(file(PROMPT), [1, 2]))


def test_calls_of_a_batch_ask_each_for_itself():
    kvs = [file(PROMPT) for _ in range(4)]
    asked = [{}, {"attention": "pages"}, {"attention": "entries", "by": "layer"}, {"attention": "entries", "top_k": 2}]
    preds = [sym.Pred(kv, [1, 2, index], **how) for index, (kv, how) in enumerate(zip(kvs, asked, strict=True))]
    dists = sym.pred_batch(preds)
    with pytest.raises(sym.Invalid, match="no attention"):
        _ = dists[0].attention
    for index, dist in enumerate(dists[1:], 1):
        alone = sym.pred(file(PROMPT), [1, 2, index], **asked[index])
        assert bytes(dist.attention.values) == bytes(alone.attention.values)
        assert dist.argmax() == alone.argmax()


def test_coroutines_ask_as_functions_do():
    async def ask():
        async with await sym.aio.kv_create() as kv:
            one = await sym.aio.pred(kv, PROMPT, attention="entries")
            [other] = await sym.aio.pred_batch([sym.Pred(kv, [1], attention="pages")])
            return bytes(one.attention.values), bytes(other.attention.values)

    kv = file()
    entries = sym.pred(kv, PROMPT, attention="entries").attention
    pages = sym.pred(kv, [1], attention="pages").attention
    assert anyio.run(ask) == (bytes(entries.values), bytes(pages.values))


# ---- the object


def test_rows_are_views_and_sums_are_added_up():
    attention = sym.pred(file(PROMPT), [1, 2], attention="entries", by="layer").attention
    whole = np.asarray(attention)
    assert np.array_equal(attention.mass(1, 0), whole[1, 0])
    assert np.shares_memory(np.asarray(attention.mass(1, 0)), whole)
    assert np.allclose(attention.mass(layer=1), whole[1].sum(axis=0), rtol=1e-6)
    assert np.allclose(attention.mass(head=1), whole[:, 1].sum(axis=0), rtol=1e-6)
    assert np.allclose(attention.mass(), whole.sum(axis=(0, 1)), rtol=1e-6)
    assert attention.values.readonly
    assert repr(attention) == f"<Attention to {len(PROMPT) + 2} entries by 2 layers and 2 KV heads>"
    with pytest.raises(sym.Invalid, match="layer=2"):
        attention.mass(2)
    with pytest.raises(sym.Invalid, match="by='layer'"):
        sym.pred(file(), [1], attention="pages").attention.mass(0)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"attention": "words"}, "attention='words'"),
        ({"attention": 1}, "attention=1"),
        ({"attention": "pages", "by": "head"}, "by='head'"),
        ({"by": "layer"}, "give attention="),
    ],
)
def test_what_can_not_be_asked_for_is_invalid_and_nothing_is_appended(how, words):
    kv = file()
    with pytest.raises(sym.Invalid, match=words):
        sym.pred(kv, [1], **how)
    assert len(kv) == 0


@pytest.mark.parametrize("change", [(0, 9), (4, 9), (8, 1), (12, 1)])
def test_a_malformed_block_is_invalid(change):
    block, kv = bytearray(attention_block("entries", "sum")), file()
    block[change[0]] = change[1]
    tokens = np.array([1], np.int32).tobytes()
    with pytest.raises(sym.Invalid, match="attention to"):
        kv.channel.perform(Call(Op.PRED, ROWS_LAST | ATTENTION, kv.handle, (1, 0, 0, 0), tokens + bytes(block)))
    with pytest.raises(sym.Invalid, match="what attention is wanted"):
        kv.channel.perform(Call(Op.PRED, ROWS_LAST | ATTENTION, kv.handle, (1, 0, 0, 0), tokens + bytes(block[:9])))
    assert len(kv) == 0


# ---- limits


def test_numbers_that_fit_no_message_are_too_large_and_pages_do():
    limit = ((1 << 20) - 80) // (4 * LAYERS * KV_HEADS)  # entries by layer
    tokens = tokens_of(4000)
    kvs = [file(tokens) for _ in range(17)]
    assert len(kvs) * 4000 > limit
    merged = sym.kv_merge(kvs, rebase=False)
    with pytest.raises(sym.TooLarge, match="ask for pages, or for the sum"):
        sym.pred(merged, [1], positions=0, attention="entries", by="layer")
    assert len(merged) == 17 * 4000
    assert sym.pred(merged, [1], positions=0, attention="pages", by="layer").attention.shape[2] == 17 * 125 + 1
    assert sym.pred(merged, [1], positions=0, attention="entries").attention.num_entries == 17 * 4000 + 2


def test_calls_of_a_batch_that_fit_no_message_together_fail_alone():
    kvs = [file(tokens_of(4000)) for _ in range(20)]
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


def runs(kept):
    """Entries as ranges for kv_extract."""
    found = []
    for entry in sorted(kept):
        if found and found[-1][1] == entry:
            found[-1] = (found[-1][0], entry + 1)
        else:
            found.append((entry, entry + 1))
    return found


def test_ranges_name_the_entries_that_are_kept():
    assert runs({0, 1, 2, 7, 9, 10}) == [(0, 3), (7, 8), (9, 11)]


def test_what_is_attended_to_most_survives_an_eviction_by_score():
    """A needle that all look at, by a mask that hides most else, is kept; what nobody sees is not."""
    kv, needle = file(PROMPT), 40
    mask = [entry == needle or entry % 9 == 0 for entry in range(len(PROMPT))]
    mass = sym.pred(kv, [1, 2, 3, 4], mask=mask, attention="entries").attention.mass()
    kept = heapq.nlargest(sum(mask), range(len(PROMPT)), key=mass.__getitem__)
    assert set(kept) == {entry for entry, seen in enumerate(mask) if seen}
    tokens, positions = sym.kv_extract(kv, runs(kept), rebase=False).read()
    assert (positions.index(needle), tokens[positions.index(needle)]) == (sum(mask[:needle]), PROMPT[needle])


def test_a_loop_with_a_budget_keeps_to_it_with_the_heaviest_and_the_latest():
    """H2O: each entry's mass goes on with it; what has least goes when there are more than the budget."""
    kv, tokens, budget, recent = file(), PROMPT, 48, 16
    scores = []
    for _ in range(20):
        mass = sym.pred(kv, tokens, attention="entries").attention.mass()
        scores = [*scores, *[0.0] * (len(mass) - len(scores))]
        scores = [score + more for score, more in zip(scores, mass, strict=True)]
        old = range(len(scores) - recent)
        kept = sorted({*heapq.nlargest(budget - recent, old, key=scores.__getitem__), *range(old.stop, len(scores))})
        lightest = min(scores[entry] for entry in kept if entry in old)
        assert all(scores[entry] <= lightest for entry in old if entry not in kept)
        kv, scores = sym.kv_extract(kv, runs(kept), rebase=False), [scores[entry] for entry in kept]
        tokens = [7]
    assert len(kv) == budget
    assert kv.read()[1][-recent:] == list(range(len(PROMPT) + 19 - recent, len(PROMPT) + 19))
