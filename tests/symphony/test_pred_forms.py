"""`pred` in all its forms over a daemon: reduced rows, attention masks, priorities, batches, the vocabulary."""

import math
import threading
import time

import anyio
import pytest

import libsym as sym

pytestmark = pytest.mark.usefixtures("connected")

VOCAB_SIZE = 259
PROMPT = list(b"Masks, rows and beams")


def file(tokens=()):
    kv = sym.kv_create()
    if len(tokens):
        sym.kv_write(kv, tokens)
    return kv


def logits(dist):
    return bytes(dist.logits)


# ---- rows answered by numbers


def test_the_likeliest_tokens_are_those_of_the_whole_row():
    whole = sym.pred(file(), PROMPT)
    reduced = sym.pred(file(), PROMPT, top_k=7)
    assert [token for token, _ in reduced.topk(7)] == [token for token, _ in whole.topk(7)]
    for (_, ours), (_, theirs) in zip(reduced.topk(7), whole.topk(7), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert reduced.argmax() == whole.argmax()
    assert reduced.entropy() == pytest.approx(whole.entropy(), abs=1e-5)


def test_named_tokens_have_the_log_probabilities_of_the_whole_row():
    whole = sym.pred(file(), PROMPT)
    reduced = sym.pred(file(), PROMPT, logprobs=iter([5, 250, 0]))
    for token in (5, 250, 0):
        assert reduced.logprob(token) == pytest.approx(whole.logprob(token), abs=1e-4)
    with pytest.raises(sym.Invalid, match="logprobs"):
        reduced.logprob(6)
    with pytest.raises(sym.Invalid, match="top_k"):
        reduced.topk(1)


def test_a_token_is_drawn_as_the_program_would_draw_it():
    sampler = sym.Sampler(temperature=1.2, top_p=0.9, repetition_penalty=1.2, seed=5)
    whole = sym.pred(file(), PROMPT)
    reduced = sym.pred(file(), PROMPT, sampler=sampler)
    assert reduced.token == sampler.start(before=PROMPT).draw(whole)
    assert reduced.logprob(reduced.token) == pytest.approx(whole.logprob(reduced.token), abs=1e-4)


def test_every_row_draws_with_a_number_of_its_own():
    sampler = sym.Sampler(temperature=2.0, seed=9)
    whole = sym.pred(file(), PROMPT, rows="all")
    reduced = sym.pred(file(), PROMPT, rows="all", sampler=sampler)
    draws = sampler.start()
    assert [row.token for row in reduced] == [draws.draw(row) for row in whole]


def test_all_of_it_can_be_asked_at_once():
    whole = sym.pred(file(), PROMPT, rows="all")
    reduced = sym.pred(file(), PROMPT, rows="all", top_k=3, logprobs=[1, 2], sampler=sym.Sampler.greedy())
    assert len(reduced) == len(PROMPT)
    for ours, theirs in zip(reduced, whole, strict=True):
        assert ours.token == ours.argmax() == theirs.argmax()
        assert ours.logprob(2) == pytest.approx(theirs.logprob(2), abs=1e-4)


def test_an_input_far_longer_than_there_are_slots_has_all_its_rows_reduced():
    tokens = [number * 7 % 256 for number in range(3000)]
    kv, by_hand = file(), file()
    reduced = sym.pred(kv, tokens, rows="all", top_k=2, logprobs=[65])
    assert len(reduced) == 3000
    assert len(kv) == 3000
    at = 0
    while at < 3000:
        whole = sym.pred(by_hand, tokens[at : at + 500], rows="all")
        for index in range(0, 500, 50):
            assert reduced[at + index].argmax() == whole[index].argmax()
            assert reduced[at + index].logprob(65) == pytest.approx(whole[index].logprob(65), abs=1e-3)
        at += 500
        del whole


def test_reduced_rows_take_no_slots():
    kv, argmax = file(), sym.pred(file(), PROMPT).argmax()
    held = sym.pred(kv, [1] * kv.channel.num_slots, rows="all")
    assert sym.pred(file(), PROMPT, top_k=1).argmax() == argmax
    del held


def test_numbers_that_fit_no_message_are_too_large_and_nothing_is_appended():
    kv = file()
    with pytest.raises(sym.TooLarge, match="rows"):
        sym.pred(kv, [1] * 1000, rows="all", top_k=VOCAB_SIZE)
    assert len(kv) == 0


def test_the_whole_distribution_can_be_asked_for_as_numbers():
    reduced = sym.pred(file(), PROMPT, top_k=VOCAB_SIZE)
    assert math.fsum(math.exp(logprob) for _, logprob in reduced.topk(VOCAB_SIZE)) == pytest.approx(1, abs=1e-4)


# ---- attention masks


def test_what_a_mask_hides_might_as_well_not_be_there():
    """An entry depends on those that it sees: with the first tokens hidden, the rest is computed as if alone."""
    hidden, seen, new = [9, 8, 7, 6, 5], [20, 21, 22, 23], [40, 41, 42]
    kv = sym.kv_create()
    sym.kv_write(kv, hidden)
    sym.pred(kv, seen, positions=0, mask=[False] * 5)
    masked = sym.pred(kv, new, mask=[False] * 5 + [True] * 4, rows="all")
    alone = file()
    sym.kv_write(alone, seen)
    plain = sym.pred(alone, new, rows="all")
    for ours, theirs in zip(masked, plain, strict=True):
        assert max(abs(a - b) for a, b in zip(ours.logits, theirs.logits, strict=True)) < 2e-2
        assert ours.argmax() == theirs.argmax()


def test_a_mask_that_hides_nothing_changes_nothing():
    plain = sym.pred(file(PROMPT), [1, 2, 3], rows="all")
    masked = sym.pred(file(PROMPT), [1, 2, 3], rows="all", mask=[True] * len(PROMPT))
    assert [logits(row) for row in masked] == [logits(row) for row in plain]


def test_one_row_for_all_is_the_same_as_that_row_for_each():
    pattern = [number % 3 != 0 for number in range(len(PROMPT))]
    each = [[*pattern, *(other <= number for other in range(3))] for number in range(3)]
    alike = sym.pred(file(PROMPT), [1, 2, 3], rows="all", mask=pattern)
    by_row = sym.pred(file(PROMPT), [1, 2, 3], rows="all", mask=each)
    assert [logits(row) for row in alike] == [logits(row) for row in by_row]
    plain = sym.pred(file(PROMPT), [1, 2, 3], rows="all")
    assert logits(alike) != logits(plain)


def test_new_tokens_can_be_hidden_from_each_other():
    """A tree in one file: two branches that do not see each other, each as if it were alone."""
    kv = file(PROMPT)
    before = len(PROMPT)
    mask = [[True] * before + [True, False], [True] * before + [False, True]]
    both = sym.pred(kv, [65, 66], positions=[before, before], mask=mask, rows="all")
    for row, token in zip(both, (65, 66), strict=True):
        alone = sym.pred(file(PROMPT), [token])
        assert max(abs(a - b) for a, b in zip(row.logits, alone.logits, strict=True)) < 2e-2


def test_a_mask_goes_with_a_single_token_in_both_forms():
    pattern = [False] * 4 + [True] * (len(PROMPT) - 4)
    alike = sym.pred(file(PROMPT), [1], mask=pattern)
    by_row = sym.pred(file(PROMPT), [1], mask=[[*pattern, True]])
    assert logits(alike) == logits(by_row)


def test_a_long_input_with_a_mask_is_computed_in_chunks():
    tokens = [number % 256 for number in range(700)]
    pattern = [number % 2 == 0 for number in range(len(PROMPT))]
    at_once = sym.pred(file(PROMPT), tokens, mask=pattern)
    kv = file(PROMPT)
    for begin in range(0, 700, 100):
        mask = pattern + [True] * begin
        in_pieces = sym.pred(kv, tokens[begin : begin + 100], mask=mask)
    assert logits(at_once) == logits(in_pieces)


@pytest.mark.parametrize(
    "mask",
    [
        [True] * 4,
        [True] * 6,
        [[True] * 6],
        [[True] * 7] * 3,
        [[True] * 7, [True] * 6],
        [[True] * 6 + [False], [True] * 6 + [False]],
        7,
        [[True] * 8, [True] * 8],
    ],
)
def test_a_mask_that_does_not_fit_is_invalid_and_nothing_is_appended(mask):
    kv = file([1, 2, 3, 4, 5])
    with pytest.raises(sym.Invalid, match="mask"):
        sym.pred(kv, [6, 7], mask=mask)
    assert len(kv) == 5


# ---- priorities


@pytest.mark.parametrize("priority", [-100, 0, 100])
def test_a_priority_changes_no_result(priority):
    assert logits(sym.pred(file(), PROMPT, priority=priority)) == logits(sym.pred(file(), PROMPT))


@pytest.mark.parametrize("priority", [-101, 101, 1.5, "high"])
def test_a_priority_out_of_range_is_invalid(priority):
    with pytest.raises(sym.Invalid, match="priority"):
        sym.pred(file(), PROMPT, priority=priority)


# ---- batches


def test_a_batch_of_32_beams_is_32_preds():
    root = file(PROMPT)
    beams, by_hand = ([sym.kv_fork(root) for _ in range(32)] for _ in range(2))
    for step in range(3):
        preds = [sym.Pred(kv, [number + step]) for number, kv in enumerate(beams)]
        dists = sym.pred_batch(preds)
        assert [logits(dist) for dist in dists] == [
            logits(sym.pred(kv, [number + step])) for number, kv in enumerate(by_hand)
        ]
    assert [sym.kv_read(kv) for kv in beams] == [sym.kv_read(kv) for kv in by_hand]


def test_a_batch_is_computed_together():
    kvs = [file() for _ in range(16)]
    before = sym.daemon_stat()["num_steps"]
    sym.pred_batch([sym.Pred(kv, [1]) for kv in kvs])
    assert sym.daemon_stat()["num_steps"] - before <= 8, (
        "the first begins at once: where the machine is busy, some follow"
    )


def test_calls_of_a_batch_may_differ_in_everything():
    kvs = [file(PROMPT) for _ in range(4)]
    one, two, three, four = sym.pred_batch(
        [
            sym.Pred(kvs[0], [1, 2, 3], rows="all"),
            sym.Pred(kvs[1], [4], 100),
            sym.Pred(kvs[2], [5, 6], top_k=3, logprobs=iter([7])),
            sym.Pred(kvs[3], [8], mask=[True, False] * 10 + [True], priority=5),
        ]
    )
    assert [logits(row) for row in one] == [logits(row) for row in sym.pred(file(PROMPT), [1, 2, 3], rows="all")]
    assert logits(two) == logits(sym.pred(file(PROMPT), [4], 100))
    assert three.topk(3) == sym.pred(file(PROMPT), [5, 6], top_k=3).topk(3)
    assert logits(four) == logits(sym.pred(file(PROMPT), [8], mask=[True, False] * 10 + [True]))


def test_calls_of_a_batch_on_one_file_follow_each_other():
    kv = file()
    dists = sym.pred_batch([sym.Pred(kv, [token]) for token in b"abc"])
    by_hand = file()
    assert [logits(dist) for dist in dists] == [logits(sym.pred(by_hand, [token])) for token in b"abc"]


def test_calls_that_fail_are_told_one_by_one_and_the_others_are_made():
    good, read_only = file(PROMPT), sym.kv_create("batch.kv")
    closed = sym.kv_open("batch.kv")
    with pytest.raises(sym.BatchFailed, match="call 1 of 4") as caught:
        sym.pred_batch(
            [
                sym.Pred(good, [1]),
                sym.Pred(good, [VOCAB_SIZE]),
                sym.Pred(good, [2], top_k=1),
                sym.Pred(closed, [3]),
            ]
        )
    failed = caught.value
    assert failed.errno == failed.results[1].errno
    assert [type(result) for result in failed.results] == [sym.Dist, sym.Invalid, sym.ReducedDist, sym.NoAccess]
    assert sym.kv_read(good)[0] == [*PROMPT, 1, 2]
    assert logits(failed.results[0]) == logits(sym.pred(file(PROMPT), [1]))
    sym.kv_remove(read_only)


def test_a_batch_of_failures_alone_is_answered_too():
    with pytest.raises(sym.BatchFailed) as caught:
        sym.pred_batch([sym.Pred(file(), [-1]) for _ in range(256)])
    assert len(caught.value.results) == 256


@pytest.mark.slow
def test_slots_of_a_batch_are_free_again_one_by_one():
    for _ in range(200):
        kvs = [file() for _ in range(4)]
        dists = sym.pred_batch([sym.Pred(kv, [1] * 16, rows="all") for kv in kvs])
        del dists[0], dists[1]


@pytest.mark.parametrize("preds", [[], [None] * 3, [1]])
def test_what_is_no_batch_is_invalid(preds):
    with pytest.raises(sym.Invalid):
        sym.pred_batch(preds)


def test_more_calls_than_a_batch_takes_are_invalid():
    kv = file()
    with pytest.raises(sym.Invalid, match="256"):
        sym.pred_batch([sym.Pred(kv, [1])] * 257)
    assert len(kv) == 0


@pytest.mark.parametrize("pred_batch", [sym.pred_batch, lambda preds: anyio.run(sym.aio.pred_batch, preds)])
def test_a_batch_never_reaches_the_files_of_another_connection(daemon, pred_batch):
    """Handles are numbers that each connection counts from 1."""
    lost = sym.kv_create()
    sym.close()
    sym.connect(daemon.socket)
    kv = sym.kv_create()
    assert kv.handle == lost.handle
    with pytest.raises(sym.NotConnected):
        pred_batch([sym.Pred(lost, [1])])
    with pytest.raises(sym.BadHandle, match="earlier connection"):
        pred_batch([sym.Pred(kv, [1]), sym.Pred(lost, [1])])
    assert len(kv) == 0


def test_a_batch_of_more_rows_than_slots_is_refused_as_a_whole():
    kvs = [file() for _ in range(3)]
    with pytest.raises(sym.TooLarge):
        sym.pred_batch([sym.Pred(kv, [1] * 1000, rows="all") for kv in kvs])
    assert [len(kv) for kv in kvs] == [0, 0, 0]


def test_threads_make_batches_at_once():
    root = file(PROMPT)
    expected = [logits(sym.pred(sym.kv_fork(root), [token])) for token in range(8)]
    found = []

    def make():
        for _ in range(10):
            dists = sym.pred_batch([sym.Pred(sym.kv_fork(root), [token]) for token in range(8)])
            found.append([logits(dist) for dist in dists] == expected)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


# ---- the vocabulary


def test_the_vocabulary_has_the_bytes_of_every_token():
    vocabulary = sym.vocabulary()
    assert vocabulary[:256] == [bytes([byte]) for byte in range(256)]
    assert vocabulary[256:] == [b"<bos>", b"<eos>", b"<pad>"]
    text = "naïve €uro"
    assert b"".join(vocabulary[token] for token in sym.tokenize(text)).decode() == text


def test_what_is_done_to_the_list_stays_the_programs_own():
    sym.vocabulary().clear()
    assert len(sym.vocabulary()) == VOCAB_SIZE


# ---- waiting for slots


def wait_for_calls(count):
    while sym.daemon_stat()["waiting_calls"] < count:
        time.sleep(0.005)


def test_calls_on_one_file_keep_their_order_where_the_first_waits_for_a_slot(connected):
    """The second is another thread's, the third another program's."""
    kv, holder = sym.kv_create("ordered.kv"), file()
    held = sym.pred(holder, [1] * holder.channel.num_slots, rows="all")
    rows = []
    waiting = threading.Thread(target=lambda: rows.append(sym.pred(kv, [10])))
    waiting.start()
    wait_for_calls(1)
    second = threading.Thread(target=sym.kv_write, args=(kv, [20]))
    second.start()
    wait_for_calls(2)
    third = connected.program("sym.kv_write(sym.kv_open('ordered.kv', 'rw'), [30])")
    wait_for_calls(3)
    assert kv.len() == 0
    del held
    waiting.join(20)
    second.join(20)
    assert third.communicate(timeout=20) == ("", "")
    assert sym.kv_read(kv)[0] == [10, 20, 30]
    assert logits(rows[0]) == logits(sym.pred(file(), [10]))
    kv.remove()


# ---- deadlines


def test_a_deadline_that_is_kept_changes_no_result():
    kv = file()
    assert logits(sym.pred(kv, PROMPT, deadline=60)) == logits(sym.pred(file(), PROMPT))
    assert kv.len() == len(PROMPT)


def test_a_deadline_that_is_missed_is_timed_out_and_appends_nothing():
    kv = file([1, 2, 3])
    with pytest.raises(sym.TimedOut, match="nothing was appended"):
        sym.pred(kv, PROMPT, deadline=1e-9)
    assert kv.len() == 3
    assert logits(sym.pred(kv, PROMPT)) == logits(sym.pred(file([1, 2, 3]), PROMPT)), "the file is free again"


def test_a_call_of_a_batch_misses_its_deadline_alone():
    kvs = [file(), file()]
    with pytest.raises(sym.BatchFailed) as caught:
        sym.pred_batch([sym.Pred(kvs[0], PROMPT, deadline=1e-9), sym.Pred(kvs[1], PROMPT, deadline=60)])
    late, kept = caught.value.results
    assert isinstance(late, sym.TimedOut)
    assert logits(kept) == logits(sym.pred(file(), PROMPT))
    assert [kv.len() for kv in kvs] == [0, len(PROMPT)]


def test_a_call_behind_a_long_generation_is_ended_at_its_deadline():
    kv = file()
    with sym.generate(kv, PROMPT, stop_at_end=False) as generation:
        next(generation)
        with pytest.raises(sym.TimedOut):
            sym.pred(kv, [7], deadline=0.05)
        assert generation.finish is None
    assert kv.len() == len(PROMPT) + len(generation.tokens) - 1


@pytest.mark.parametrize("deadline", [0, -1, math.inf, math.nan, 1e12, "soon"])
def test_a_deadline_that_is_none_is_invalid(deadline):
    with pytest.raises(sym.Invalid, match="deadline"):
        sym.pred(file(), PROMPT, deadline=deadline)
    with pytest.raises(sym.Invalid, match="deadline"):
        sym.generate(file(), PROMPT, deadline=deadline)


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_deadlines_in_an_event_loop(backend):
    async def main():
        kv = await sym.aio.kv_create()
        with pytest.raises(sym.TimedOut):
            await sym.aio.pred(kv, PROMPT, deadline=1e-9)
        await sym.aio.pred(kv, PROMPT, deadline=60)
        generation = await sym.aio.generate(kv, [1], stop_at_end=False, deadline=0.1)
        tokens = [token async for token in generation]
        assert generation.finish == "deadline"
        assert generation.pending == tokens[-1:]
        assert sym.kv_read(kv)[0] == [*PROMPT, 1, *tokens[:-1]]

    anyio.run(main, backend=backend)


def test_the_calls_of_one_batch_share_a_step_also_where_nothing_was_computed_before(connected):
    """The first of them wakes a run that sleeps, which waits a moment for the others."""
    kvs = [sym.kv_create() for _ in range(2)]
    before, num_batches = sym.daemon_stat()["num_steps"], 40
    for _ in range(num_batches):
        sym.pred_batch([sym.Pred(kv, [65], top_k=1) for kv in kvs])
        sym.kv_list()  # the run falls asleep meanwhile
        sym.daemon_stat()
    assert sym.daemon_stat()["num_steps"] - before < 1.5 * num_batches
