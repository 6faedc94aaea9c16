"""`pred` in all its forms over a daemon: reduced rows, attention masks, priorities, batches, deadlines, the vocabulary.

`tests/scheduler` proves what the gate makes of wrong calls, of late ones, and of those that wait for slots.
"""

import math

import anyio
import pytest

import libsym as sym

pytestmark = pytest.mark.usefixtures("shared")

VOCAB_SIZE = 259
PROMPT = list(b"Masks, rows and beams")
LENGTH = len(PROMPT)
PATTERN = [number % 3 != 0 for number in range(LENGTH)]


def file(tokens=()):
    kv = sym.kv_create()
    if len(tokens):
        sym.kv_write(kv, tokens)
    return kv


def bits(dist):
    return [bytes(row.logits) for row in dist]


# ---- rows answered by numbers


def test_numbers_are_those_of_the_whole_rows_and_each_row_draws_with_a_number_of_its_own():
    sampler = sym.Sampler(temperature=2.0, top_p=0.9, seed=9)
    whole = sym.pred(file(), PROMPT, rows="all")
    reduced = sym.pred(file(), PROMPT, rows="all", top_k=7, logprobs=iter([5, 250, 0]), sampler=sampler)
    draws = sampler.start()
    for ours, theirs in zip(reduced, whole, strict=True):
        assert [token for token, _ in ours.topk(7)] == [token for token, _ in theirs.topk(7)]
        assert ours.argmax() == theirs.argmax()
        assert ours.entropy() == pytest.approx(theirs.entropy(), abs=1e-5)
        assert ours.token == draws.draw(theirs)
        for token in (5, 250, 0, ours.token, ours.argmax()):
            assert ours.logprob(token) == pytest.approx(theirs.logprob(token), abs=1e-4)


def test_an_input_far_longer_than_there_are_slots_has_all_its_rows_reduced():
    tokens = [number * 7 % 256 for number in range(3000)]
    kv, by_hand = file(), file()
    reduced = sym.pred(kv, tokens, rows="all", top_k=2, logprobs=[65])
    assert len(reduced) == len(kv) == 3000
    for at in range(0, 3000, 500):
        whole = sym.pred(by_hand, tokens[at : at + 500], rows="all")
        for index in range(0, 500, 50):
            assert reduced[at + index].argmax() == whole[index].argmax()
            assert reduced[at + index].logprob(65) == pytest.approx(whole[index].logprob(65), abs=1e-3)
        del whole


def test_reduced_rows_take_no_slots():
    kv, argmax = file(), sym.pred(file(), PROMPT).argmax()
    held = sym.pred(kv, [1] * kv.channel.num_slots, rows="all")
    assert sym.pred(file(), PROMPT, top_k=1).argmax() == argmax
    del held


# ---- attention masks


def test_what_a_mask_hides_might_as_well_not_be_there():
    """An entry depends on those that it sees: with the first tokens hidden, the rest is computed as if alone."""
    kv, alone = file([9, 8, 7, 6, 5]), file([20, 21, 22, 23])
    sym.pred(kv, [20, 21, 22, 23], positions=0, mask=[False] * 5)
    masked = sym.pred(kv, [40, 41, 42], mask=[False] * 5 + [True] * 4, rows="all")
    for ours, theirs in zip(masked, sym.pred(alone, [40, 41, 42], rows="all"), strict=True):
        assert ours.logits.tolist() == pytest.approx(theirs.logits.tolist(), abs=2e-2)


@pytest.mark.parametrize(
    ("tokens", "mask", "same"),
    [
        ([1, 2, 3], [True] * LENGTH, None),
        ([1, 2, 3], PATTERN, [[*PATTERN, *(other <= number for other in range(3))] for number in range(3)]),
        ([1], PATTERN, [[*PATTERN, True]]),
    ],
    ids=["hides nothing", "a row for all and for each", "a single token"],
)
def test_masks_that_say_the_same_give_the_same_bits(tokens, mask, same):
    found, wanted, plain = (bits(sym.pred(file(PROMPT), tokens, rows="all", mask=each)) for each in (mask, same, None))
    assert found == wanted
    assert (found == plain) == all(mask)


def test_a_long_input_with_a_mask_is_computed_in_chunks():
    tokens, kv = [number % 256 for number in range(700)], file(PROMPT)
    for begin in range(0, 700, 100):
        in_pieces = sym.pred(kv, tokens[begin : begin + 100], mask=PATTERN + [True] * begin)
    assert bits(sym.pred(file(PROMPT), tokens, mask=PATTERN)) == bits(in_pieces)


# ---- what is refused


MASKS = [
    *([True] * 4, [True] * 6, [[True] * 6], [[True] * 7] * 3, [[True] * 7, [True] * 6], 7),
    *([[True] * 6 + [False]] * 2, [[True] * 8, [True] * 8]),
]
DEADLINES = [0, math.inf, math.nan, 1e12, "soon"]
REFUSED = [
    *(({"mask": mask}, sym.Invalid, "mask") for mask in MASKS),
    *(({"priority": priority}, sym.Invalid, "priority") for priority in (-101, 101, 1.5, "high")),
    *(({"deadline": deadline}, sym.Invalid, "deadline") for deadline in DEADLINES),
    ({"tokens": [1] * 1000, "rows": "all", "top_k": VOCAB_SIZE}, sym.TooLarge, "rows"),
    ({"deadline": 1e-9}, sym.TimedOut, "nothing was appended"),
]


@pytest.mark.parametrize(("words", "error", "message"), REFUSED, ids=str)
def test_a_call_that_is_refused_appends_nothing_and_the_next_one_goes_on(words, error, message):
    kv = file(PROMPT[:5])
    with pytest.raises(error, match=message):
        sym.pred(kv, **{"tokens": [6, 7], **words})
    assert len(kv) == 5
    if "deadline" in words and error is sym.Invalid:
        with pytest.raises(error, match=message):
            sym.generate(kv, [6], **words)
    assert bits(sym.pred(kv, [8])) == bits(sym.pred(file(PROMPT[:5]), [8]))


@pytest.mark.parametrize(
    ("preds", "error", "message"),
    [
        (lambda kvs: [sym.Pred(kvs[0], [1])] * 257, sym.Invalid, "256"),
        (lambda kvs: [sym.Pred(kv, [1] * 1000, rows="all") for kv in kvs], sym.TooLarge, "slots"),
    ],
    ids=["too many calls", "more rows than slots"],
)
def test_a_batch_that_is_too_large_is_refused_as_a_whole(preds, error, message):
    kvs = [file() for _ in range(3)]
    with pytest.raises(error, match=message):
        sym.pred_batch(preds(kvs))
    assert [len(kv) for kv in kvs] == [0, 0, 0]


# ---- batches


def test_calls_of_a_batch_may_differ_in_everything_and_those_on_one_file_follow_each_other():
    kvs = [file(PROMPT) for _ in range(4)]
    mask = [True, False] * 10 + [True]
    one, two, three, four, fifth = sym.pred_batch(
        [
            sym.Pred(kvs[0], [1, 2, 3], rows="all"),
            sym.Pred(kvs[1], [4], 100),
            sym.Pred(kvs[2], [5, 6], top_k=3, logprobs=iter([7])),
            sym.Pred(kvs[3], [8], mask=mask, priority=5),
            sym.Pred(kvs[0], [9]),
        ]
    )
    alone = file(PROMPT)
    assert bits(one) == bits(sym.pred(alone, [1, 2, 3], rows="all"))
    assert bits(two) == bits(sym.pred(file(PROMPT), [4], 100))
    assert three.topk(3) == sym.pred(file(PROMPT), [5, 6], top_k=3).topk(3)
    assert bits(four) == bits(sym.pred(file(PROMPT), [8], mask=mask))
    assert bits(fifth) == bits(sym.pred(alone, [9]))


def test_calls_that_fail_are_told_one_by_one_and_the_others_are_made():
    good, late, read_only = file(PROMPT), file(), sym.kv_create("batch.kv")
    calls = [sym.Pred(good, [1]), sym.Pred(good, [VOCAB_SIZE]), sym.Pred(good, [2], top_k=1)]
    calls += [sym.Pred(sym.kv_open("batch.kv"), [3]), sym.Pred(late, PROMPT, deadline=1e-9)]
    with pytest.raises(sym.BatchFailed, match="call 1 of 5") as caught:
        sym.pred_batch(calls)
    results = caught.value.results
    assert caught.value.errno == results[1].errno
    assert [type(each) for each in results] == [sym.Dist, sym.Invalid, sym.ReducedDist, sym.NoAccess, sym.TimedOut]
    assert (sym.kv_read(good)[0], len(late)) == ([*PROMPT, 1, 2], 0)
    assert bits(results[0]) == bits(sym.pred(file(PROMPT), [1]))
    sym.kv_remove(read_only)
    with pytest.raises(sym.BatchFailed) as caught:
        sym.pred_batch([sym.Pred(late, [-1])] * 256)
    assert len(caught.value.results) == 256


@pytest.mark.parametrize("pred_batch", [sym.pred_batch, lambda preds: anyio.run(sym.aio.pred_batch, preds)])
def test_a_batch_never_reaches_the_files_of_another_connection(shared, pred_batch):
    """Handles are numbers that each connection counts from 1."""
    lost = sym.kv_create()
    sym.close()
    sym.connect(shared.socket)
    kv = sym.kv_create()
    assert kv.handle == lost.handle
    with pytest.raises(sym.NotConnected):
        pred_batch([sym.Pred(lost, [1])])
    with pytest.raises(sym.BadHandle, match="earlier connection"):
        pred_batch([sym.Pred(kv, [1]), sym.Pred(lost, [1])])
    assert len(kv) == 0


# ---- the vocabulary, and event loops


def test_the_vocabulary_has_the_bytes_of_every_token_and_stays_as_it_is():
    vocabulary = sym.vocabulary()
    assert vocabulary == [*(bytes([byte]) for byte in range(256)), b"<bos>", b"<eos>", b"<pad>"]
    text = "naïve €uro"
    assert b"".join(vocabulary[token] for token in sym.tokenize(text)).decode() == text
    vocabulary.clear()
    assert len(sym.vocabulary()) == VOCAB_SIZE
