"""PRED, PRED_BATCH and GENERATE as a malicious program may send them, and how tokens wait for a reader."""

import errno
import gc
import re
import struct
import tracemalloc
from array import array
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from libsym.abi import ATTENTION, MASKED, REDUCED, ROWS_ALL, ROWS_LAST, Finish, Op
from libsym.rows.attention import attention_block
from libsym.rows.reduced import reduction_block
from libsym.rows.sampler import Sampler
from scheduler.batch.attention import AttentionMass
from scheduler.batch.call import PredCall
from scheduler.batch.generation import GenerateCall
from scheduler.batch.policy import StepLimits
from scheduler.connection.system_call import SystemCall
from scheduler.connection.under_way import cost_of
from tests.scheduler.appended import GREEDY, Requests, batch, cancel, frame, generate, int32, options, pred
from tests.scheduler.bench import NUM_SLOTS, VOCAB_SIZE


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Requests(tmp_path_factory.mktemp("bench"), limits=StepLimits())


def the_error(answers, number=1):
    return answers.replies[number][-1][2]


def masked(*numbers, tail=b""):
    return pred(int32(1) + struct.pack(f"={len(numbers)}I", *numbers) + tail, flags=ROWS_LAST | MASKED)


def reduced(block):
    return pred(int32(1) + block, flags=ROWS_LAST | REDUCED)


def asking(*numbers):
    return pred(int32(1) + struct.pack(f"={len(numbers)}I", *numbers), flags=ROWS_LAST | ATTENTION)


ENDLESS = (1 << 32) - 1
WRONG_PREDS = {
    "more tokens than the context has places": pred(int32(*[1] * 5000), args=(5000, 0, 0, 0)),
    "no tokens": pred(b"", args=(0, 0, 0, 0)),
    "attention of a kind that there is not": asking(3, 1, 0, 0),
    "attention by what there is not": asking(1, 0, 0, 0),
    "attention with more than it takes": asking(1, 1, 0, 1),
    "half of what attention is wanted": asking(1, 1),
    "attention that was not announced": pred(int32(1) + attention_block("pages", "sum")),
    "a negative number of tokens": pred(int32(1), args=(-1, 0, 0, 0)),
    "more tokens than were sent": pred(int32(1), args=(2, 0, 0, 0)),
    "as many tokens as there are numbers": pred(int32(1), args=(1 << 62, 0, 0, 0)),
    "fewer tokens than were sent": pred(int32(1, 2), args=(1, 0, 0, 0)),
    "half a token": pred(b"\1\0", args=(1, 0, 0, 0)),
    "a token beyond the vocabulary": pred(int32(VOCAB_SIZE)),
    "a negative token": pred(int32(-1)),
    "a position beyond the context": pred(int32(1, 1 << 30), args=(1, 1, 0, 0)),
    "a first position whose last overflows": pred(int32(1, 2, (1 << 31) - 1), args=(2, 1, 0, 0)),
    "a negative position": pred(int32(1, -1), args=(1, 1, 0, 0)),
    "some positions": pred(int32(1, 2, 3, 4, 5), args=(3, 2, 0, 0)),
    "a negative number of positions": pred(int32(1), args=(1, -1, 0, 0)),
    "two kinds of rows": pred(int32(1), flags=ROWS_LAST | ROWS_ALL),
    "no kind of rows": pred(int32(1), flags=0),
    "a priority beyond the limits": pred(int32(1), args=(1, 0, 0, 101)),
    "a deadline before now": pred(int32(1), args=(1, 0, -1, 0)),
    "a mask that is not there": masked(),
    "a mask that is cut short": masked(1, 1),
    "a mask of four billion columns": masked(1, ENDLESS),
    "a mask of four billion rows": masked(ENDLESS, 0),
    "a mask of another file": masked(1, 9, 0x1FF),
    "a mask of no rows": masked(0, 0),
    "what follows a mask": masked(1, 0, tail=b"more"),
    "a reduction that is not there": reduced(b""),
    "more named tokens than were sent": reduced(struct.pack("=IIII", 1, ENDLESS, 0, 0)),
    "a named token beyond the vocabulary": reduced(reduction_block(1, [VOCAB_SIZE])),
    "more likely tokens than there are": reduced(reduction_block(VOCAB_SIZE + 1)),
    "a reserved field": reduced(struct.pack("=IIII", 1, 0, 0, 1)),
    "a sampler that is cut short": reduced(reduction_block(None, (), GREEDY[:-1])),
    "what follows a reduction": reduced(reduction_block(1) + b"more"),
    "a file that is open for reading": pred(int32(1), handle=2),
    "a handle that is none": pred(int32(1), handle=77),
}


@pytest.mark.parametrize("request_", WRONG_PREDS.values(), ids=WRONG_PREDS)
def test_a_pred_that_is_wrong_is_answered_by_an_error_and_appends_nothing(bench, request_):
    answers = bench.send(request_)
    assert the_error(answers).errno in {errno.EINVAL, errno.EACCES, errno.EBADF, errno.EMSGSIZE}
    assert (bench.tokens, len(answers.free)) == ([], NUM_SLOTS)


GOOD = frame(pred(int32(1)))
WRONG_BATCHES = {
    "none": batch(0, b""),
    "a negative number": batch(-1, GOOD),
    "more than are possible": batch(257, GOOD * 257),
    "more than were sent": batch(2, GOOD),
    "fewer than were sent": batch(1, GOOD * 2),
    "a frame that is cut short": batch(1, GOOD[:40]),
    "a payload that is cut short": batch(1, GOOD[:64]),
    "a frame without padding": batch(1, GOOD[:68]),
    "a frame smaller than its header": batch(1, frame(pred(int32(1)), frame_bytes=63)),
    "a frame larger than the message": batch(1, frame(pred(int32(1)), frame_bytes=0xFFFFFFFF)),
    "another operation": batch(1, frame(pred(int32(1)), op=Op.KV_CLOSE)),
    "a batch in a batch": batch(1, frame(pred(int32(1)), op=Op.PRED_BATCH)),
    "a reserved field": batch(1, frame(pred(int32(1)), zero=1)),
}


@pytest.mark.parametrize("request_", WRONG_BATCHES.values(), ids=WRONG_BATCHES)
def test_a_batch_that_is_no_batch_is_an_error_as_a_whole(bench, request_):
    answers = bench.send(request_)
    assert the_error(answers).errno == errno.EINVAL
    assert (bench.tokens, len(answers.free)) == ([], NUM_SLOTS)


def test_masks_of_calls_that_wait_take_no_more_room_than_they_came_with(bench):
    payload = int32(1) + struct.pack("=II", 1, 8 * 900_000) + bytes(900_000)
    waiting = [pred(payload, flags=ROWS_LAST | MASKED, number=number) for number in range(2, 10)]
    tracemalloc.start()
    try:
        answers = bench.send(pred(int32(1)), *waiting)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {the_error(answers, each.id).errno for each in waiting} == {errno.EINVAL}
    assert peak < 2 * len(waiting) * len(payload), f"{peak} bytes"


@pytest.mark.parametrize("op", [Op.PRED, Op.PRED_BATCH, Op.GENERATE])
def test_what_calls_that_append_came_with_counts_until_they_are_answered(bench, op):
    payload = int32(*[1] * 100)
    asked = {
        Op.PRED: pred(payload, args=(100, 0, 0, 0)),
        Op.PRED_BATCH: batch(1, frame(pred(payload, args=(100, 0, 0, 0)))),
        Op.GENERATE: generate(payload + GREEDY, args=(100, 0, 4, 0)),
    }[op]
    counted = []

    def note(lip):
        lip.channel.asked = lambda: counted.append(lip.under_way.num_bytes)

    bench.send(asked, prepare=note)
    assert counted == [cost_of(asked)]


def test_every_wrong_pred_is_an_error_of_its_own_in_a_batch(bench):
    parts = [frame(each) for each in WRONG_PREDS.values()] + [GOOD]
    answers = bench.send(batch(len(parts), b"".join(parts)))
    (args, payload, error), at, codes = answers.replies[1][0], 0, []
    assert (args, error) == ((len(parts),), None)
    while at < len(payload):
        size, code = struct.unpack_from("=Ii", payload, at)
        codes.append(code)
        at += -(-size // 64) * 64
    assert len(codes) == len(parts)
    assert all(codes[:-1])
    assert codes[-1] == 0
    assert len(bench.tokens) == 1
    assert answers.num_held_slots == 1


@pytest.mark.slow
def test_errors_that_are_kept_are_no_garbage_with_a_buffer_in_it(bench):
    """CPython ends the process when its collector finds a memoryview that C has a buffer of."""
    broken = pred(int32(1) + struct.pack("=IIII", 0, 0, 1, 0) + bytes(60), flags=ROWS_LAST | REDUCED)
    impossible = Sampler(logit_bias={ord("a"): -np.inf}).block() + options(grammar={"kind": "regex", "source": "a"})
    requests = batch(2, 2 * frame(broken)), broken, generate(int32(1) + impossible)
    gc.collect()
    gc.disable()
    try:
        for each in requests:
            bench.send(each)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        for each in gc.garbage:
            if isinstance(each, memoryview):
                each.release()  # BufferError: somebody has a buffer of it
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


SAMPLED = GREEDY[:48]
WRONG_ENDS = {
    "no sampler": b"",
    "a sampler that is cut short": GREEDY[:63],
    "a sampler with more biases than were sent": SAMPLED + struct.pack("=IIII", ENDLESS, 0, 0, 0),
    "a sampler that is not a number": struct.pack("=d", float("nan")) + GREEDY[8:],
    "no JSON": GREEDY + b"{",
    "JSON that is too deep": GREEDY + b"[" * 100_000,
    "JSON that is no object": GREEDY + b"[1]",
    "half a character in a grammar": GREEDY + b'{"grammar": {"kind": "regex", "source": "\\ud800"}}',
    "half a character to stop at": GREEDY + b'{"stop": ["\\ud800"]}',
}
WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "an unknown option": {"colour": "red"},
    "stop tokens that are none": {"stop_tokens": ["a"]},
    "a stop token that is a bool": {"stop_tokens": [True]},
    "a stop token beyond the vocabulary": {"stop_tokens": [VOCAB_SIZE]},
    "more stop tokens than anybody needs": {"stop_tokens": [1] * 20_000},
    "more names than there are": {f"x{i}": None for i in range(200)},
    "a stop text that is none": {"stop": [1]},
    "an empty stop text": {"stop": [""]},
    "too many stop texts": {"stop": ["a"] * 65},
    "a stop text that is too long": {"stop": ["a" * 1025]},
    "a grammar without a source": {"grammar": {"kind": "json"}},
    "a grammar of an unknown kind": {"grammar": {"kind": "x", "source": "x"}},
    "a grammar that is none": {"grammar": {"kind": "regex", "source": "("}},
    "a draft without numbers": {"draft": {"max_tokens": "8", "min_match": 2}},
    "a draft that is too long": {"draft": {"max_tokens": 65, "min_match": 2}},
    "an end that is neither": {"stop_at_end": "no"},
    "a deadline of no time": {"deadline_us": 0},
    "a deadline that is no number": {"deadline_us": True},
    "a deadline beyond 63 bits": {"deadline_us": 1 << 63},
}
WRONG_GENERATIONS = {
    **{what: generate(int32(1) + end) for what, end in WRONG_ENDS.items()},
    **{what: generate(int32(1) + GREEDY + options(**given)) for what, given in WRONG_OPTIONS.items()},
    "a negative number of tokens to make": generate(int32(1) + GREEDY, args=(1, 0, -1, 0)),
    "a priority beyond the limits": generate(int32(1) + GREEDY, args=(1, 0, 1, -101)),
    "no tokens": generate(GREEDY, args=(0, 0, 1, 0)),
    "a file that is open for reading": generate(int32(1) + GREEDY, handle=2),
}


@pytest.mark.parametrize("request_", WRONG_GENERATIONS.values(), ids=WRONG_GENERATIONS)
def test_a_generation_that_is_wrong_is_answered_by_an_error_and_appends_nothing(bench, request_):
    answers = bench.send(request_)
    assert the_error(answers).errno in {errno.EINVAL, errno.EACCES}
    assert len(answers.replies[1]) == 1
    assert bench.tokens == []


# ---- on the way to the program


def test_what_is_in_a_stop_text_or_a_grammar_counts_as_text(bench):
    text = '\\"[,\\\\' * 150
    asked = options(stop=[text] * 64, grammar={"kind": "regex", "source": "[ab]|" + re.escape(text)})
    answers = bench.send(generate(int32(1) + GREEDY + asked))
    assert the_error(answers) is None


def tokens_of(answers, number=1):
    return [list(array("i", payload)) for _, payload, error in answers.replies[number] if error is None]


def test_tokens_that_find_no_room_are_sent_together(bench):
    """The ring has none here at all: so this is what is sent in the end."""
    answers = bench.send(generate(int32(1, 2) + GREEDY, args=(2, 0, 20, 0)))
    first, rest, last = answers.replies[1]
    assert first[0] == (1, 2)  # from the first a program knows how long the file was
    assert rest[0] == (19, 21)
    assert last == ((0, 21, Finish.LENGTH, -1), b"", None)


def test_what_was_kept_is_sent_before_an_error(bench):
    """The pool has 64 pages of 32 entries."""
    payload = int32(*[1] * 2000) + GREEDY + options(stop_at_end=False)
    answers = bench.send(generate(payload, args=(2000, 0, 100, 0)))
    assert the_error(answers).errno == errno.ENOSPC
    assert sum(map(len, tokens_of(answers))) == len(bench.tokens) - 2000 + 1
    assert answers.replies[1][-2][0] == (0, len(bench.tokens))


def test_a_cancelled_generation_says_so_and_where_the_file_is(bench):
    endless = generate(int32(1) + GREEDY + options(stop_at_end=False), args=(1, 0, 0, 0), number=5)
    args, _, error = bench.send(endless, cancel(6)).replies[5][-1]
    assert error is None or error.errno == errno.ECANCELED
    if error is None:
        assert args[1:3] == (len(bench.tokens), Finish.CANCELLED)


def test_a_cancelled_pred_or_batch_appends_nothing_and_gives_its_slots_back(bench):
    asked = pred(int32(*[1] * 40), flags=ROWS_ALL, args=(40, 0, 0, 0), number=5)
    answers = bench.send(asked, cancel(6))
    assert the_error(answers, 5).errno == errno.ECANCELED
    assert (bench.tokens, len(answers.free)) == ([], NUM_SLOTS)
    answers = bench.send(batch(3, frame(pred(int32(1, 2), args=(2, 0, 0, 0))) * 3, number=5), cancel(6))
    (args, payload, error) = answers.replies[5][0]
    assert (args, error) == ((3,), None), "it is told call by call"
    assert struct.unpack_from("=Ii", payload, 0)[1] == errno.ECANCELED
    assert (bench.tokens, len(answers.free)) == ([], NUM_SLOTS)


@pytest.mark.slow
def test_a_call_that_ends_early_leaves_nothing_of_its_attention(bench):
    tokens = int32(*[1] * 2000) + attention_block("entries", "layer")
    asking = pred(tokens, flags=ROWS_LAST | ATTENTION, args=(2000, 0, 0, 0), number=5)
    answers = bench.send(asking, cancel(6))
    assert the_error(answers, 5).errno == errno.ECANCELED
    late = asking._replace(args=(2000, 0, 1, 0))
    assert the_error(bench.send(late), 5).errno == errno.ETIMEDOUT
    assert bench.tokens == []
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is AttentionMass]


def kept_of_calls():
    """Return the objects of calls that still hold a program's data. Kinds that the collector frees are left out."""
    kinds = (PredCall, GenerateCall, SystemCall, AttentionMass)
    return [each for each in gc.get_objects() if issubclass(type(each), kinds)]  # others' __class__ may warn


LARGE = {
    "pred": pred(int32(*[1] * 100), args=(100, 0, 0, 0)),
    "attention": pred(
        int32(*[1] * 100) + attention_block("entries", "layer"), flags=ROWS_LAST | ATTENTION, args=(100, 0, 0, 0)
    ),
    "batch": batch(2, 2 * frame(pred(int32(*[1] * 100), args=(100, 0, 0, 0)))),
    "generation": generate(int32(*[1] * 100) + GREEDY, args=(100, 0, 4, 0)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("request_", LARGE.values(), ids=LARGE)
def test_what_a_program_sent_is_freed_when_it_is_answered_or_goes(bench, request_):
    """The program that goes has one call that is ready and one behind it, or both wait for slots."""

    async def main(has_slots):
        lip = bench.lip()
        lip.add(bench.file())
        if not has_slots:
            lip.channel.free.clear()
        async with trio.open_nursery() as nursery:
            for number in (1, 2):
                bench.gate.handle(lip, request_._replace(id=number), nursery)
            assert len(lip.calls) == 2
            await bench.gate.see_off(lip)
        assert lip.under_way.num_bytes == 0

    bench.send(request_)
    assert kept_of_calls() == []
    for has_slots in (True, False):
        trio.run(main, has_slots)
        bench.fs.check()
        assert kept_of_calls() == []
