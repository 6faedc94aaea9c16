"""PRED, PRED_BATCH and GENERATE as a malicious program may send them, and how tokens wait for a reader."""

import errno
import gc
import json
import logging
import re
import struct
import tracemalloc
from array import array

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libsym.abi import ATTENTION, MASKED, REDUCED, ROWS_ALL, ROWS_LAST, ROWS_NONE, Finish, Op
from libsym.channel.server import Request
from libsym.rows.attention import attention_block
from libsym.rows.reduced import reduction_block
from libsym.rows.sampler import Sampler
from scheduler.batch.attention import AttentionMass
from scheduler.batch.call import PredCall
from scheduler.batch.generation import GenerateCall
from scheduler.batch.policy import StepLimits
from scheduler.connection.system_call import SystemCall
from scheduler.connection.under_way import cost_of
from tests.scheduler.bench import ME, NUM_SLOTS, VOCAB_SIZE, Bench

REQUEST = struct.Struct("=IHHIIQQqqqq")
GREEDY = Sampler.greedy().block()


class Requests(Bench):
    def send(self, *requests, prepare=lambda _lip: None):
        """Send requests of one program to its file (handle 1) and to one that it may read (2); their replies."""
        lip = self.lip()
        prepare(lip)

        async def scenario():
            file = self.file()
            lip.add(file)
            reading = self.fs.kv_create(ME, "read.kv")
            lip.add(self.fs.kv_open(ME, "read.kv", write=False))
            async with trio.open_nursery() as nursery:
                for request in requests:
                    self.gate.handle(lip, request, nursery)
                lip.channel.asked()
                while len(lip.channel.over) < len({request.id for request in requests}):
                    await trio.testing.wait_all_tasks_blocked()
                    await trio.sleep(0.001)
            self.length = file.table.length
            assert lip.calls == {}
            assert lip.channel.num_lent_slots == 0, "every call is answered"
            assert lip.under_way.num_bytes == 0
            await self.gate.see_off(lip)
            self.fs.kv_remove(ME, "read.kv")
            self.fs.kv_close(reading)

        self.run(scenario)
        return lip.channel


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Requests(tmp_path_factory.mktemp("bench"), limits=StepLimits())


def int32(*numbers):
    return array("i", numbers).tobytes()


def pred(payload, *, flags=ROWS_LAST, handle=1, args=None, number=1):
    return Request(Op.PRED, flags, number, handle, args or (1, 0, 0, 0), payload)


def generate(payload, *, handle=1, args=(1, 0, 4, 0), number=1):
    return Request(Op.GENERATE, 0, number, handle, args, payload)


def frame(request, *, op=Op.PRED, frame_bytes=None, zero=0):
    size = 64 + len(request.payload) if frame_bytes is None else frame_bytes
    header = REQUEST.pack(size, op, zero, request.flags, 0, request.id, request.handle, *request.args)
    return header + request.payload + bytes(-len(request.payload) % 64)


def batch(count, payload, number=1):
    return Request(Op.PRED_BATCH, 0, number, 0, (count, 0, 0, 0), payload)


def the_error(answers, number=1):
    return answers.replies[number][-1][2]


MASK = struct.pack("=II", 1, 0)
ASKS = ROWS_LAST | ATTENTION
WRONG_PREDS = {
    "more tokens than the context has places": pred(int32(*[1] * 5000), args=(5000, 0, 0, 0)),
    "no tokens": pred(b"", args=(0, 0, 0, 0)),
    "attention of a kind that there is not": pred(int32(1) + struct.pack("=IIII", 3, 1, 0, 0), flags=ASKS),
    "attention by what there is not": pred(int32(1) + struct.pack("=IIII", 1, 0, 0, 0), flags=ASKS),
    "attention with more than it takes": pred(int32(1) + struct.pack("=IIII", 1, 1, 0, 1), flags=ASKS),
    "half of what attention is wanted": pred(int32(1) + struct.pack("=II", 1, 1), flags=ASKS),
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
    "a mask that is not there": pred(int32(1), flags=ROWS_LAST | MASKED),
    "a mask that is cut short": pred(int32(1) + struct.pack("=II", 1, 1), flags=ROWS_LAST | MASKED),
    "a mask of four billion columns": pred(int32(1) + struct.pack("=II", 1, 0xFFFFFFFF), flags=ROWS_LAST | MASKED),
    "a mask of four billion rows": pred(int32(1) + struct.pack("=II", 0xFFFFFFFF, 0), flags=ROWS_LAST | MASKED),
    "a mask of another file": pred(int32(1) + struct.pack("=III", 1, 9, 0x1FF), flags=ROWS_LAST | MASKED),
    "a mask of no rows": pred(int32(1) + struct.pack("=II", 0, 0), flags=ROWS_LAST | MASKED),
    "what follows a mask": pred(int32(1) + MASK + b"more", flags=ROWS_LAST | MASKED),
    "a reduction that is not there": pred(int32(1), flags=ROWS_LAST | REDUCED),
    "more named tokens than were sent": pred(
        int32(1) + struct.pack("=IIII", 1, 0xFFFFFFFF, 0, 0), flags=ROWS_LAST | REDUCED
    ),
    "a named token beyond the vocabulary": pred(int32(1) + reduction_block(1, [VOCAB_SIZE]), flags=ROWS_LAST | REDUCED),
    "more likely tokens than there are": pred(int32(1) + reduction_block(VOCAB_SIZE + 1), flags=ROWS_LAST | REDUCED),
    "a reserved field": pred(int32(1) + struct.pack("=IIII", 1, 0, 0, 1), flags=ROWS_LAST | REDUCED),
    "a sampler that is cut short": pred(int32(1) + reduction_block(None, (), GREEDY[:-1]), flags=ROWS_LAST | REDUCED),
    "what follows a reduction": pred(int32(1) + reduction_block(1) + b"more", flags=ROWS_LAST | REDUCED),
    "a file that is open for reading": pred(int32(1), handle=2),
    "a handle that is none": pred(int32(1), handle=77),
}


@pytest.mark.parametrize("request_", WRONG_PREDS.values(), ids=WRONG_PREDS.keys())
def test_a_pred_that_is_wrong_is_answered_by_an_error_and_appends_nothing(bench, request_):
    answers = bench.send(request_)
    assert the_error(answers).errno in {errno.EINVAL, errno.EACCES, errno.EBADF, errno.EMSGSIZE}
    assert bench.length == 0
    assert len(answers.free) == NUM_SLOTS


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


@pytest.mark.parametrize("request_", WRONG_BATCHES.values(), ids=WRONG_BATCHES.keys())
def test_a_batch_that_is_no_batch_is_an_error_as_a_whole(bench, request_):
    answers = bench.send(request_)
    assert the_error(answers).errno == errno.EINVAL
    assert bench.length == 0
    assert len(answers.free) == NUM_SLOTS


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
    assert bench.length == 1
    assert answers.num_held_slots == 1


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


def options(**given):
    return json.dumps(given).encode()


WRONG_GENERATIONS = {
    "no sampler": generate(int32(1)),
    "a sampler that is cut short": generate(int32(1) + GREEDY[:63]),
    "a sampler with more biases than were sent": generate(
        int32(1) + GREEDY[:48] + struct.pack("=IIII", 0xFFFFFFFF, 0, 0, 0)
    ),
    "a sampler that is not a number": generate(int32(1) + struct.pack("=d", float("nan")) + GREEDY[8:]),
    "no JSON": generate(int32(1) + GREEDY + b"{"),
    "JSON that is too deep": generate(int32(1) + GREEDY + b"[" * 100_000),
    "JSON that is no object": generate(int32(1) + GREEDY + b"[1]"),
    "an unknown option": generate(int32(1) + GREEDY + options(colour="red")),
    "stop tokens that are none": generate(int32(1) + GREEDY + options(stop_tokens=["a"])),
    "a stop token that is a bool": generate(int32(1) + GREEDY + options(stop_tokens=[True])),
    "a stop token beyond the vocabulary": generate(int32(1) + GREEDY + options(stop_tokens=[VOCAB_SIZE])),
    "more stop tokens than anybody needs": generate(int32(1) + GREEDY + options(stop_tokens=[1] * 20_000)),
    "more names than there are": generate(int32(1) + GREEDY + options(**{f"x{i}": None for i in range(200)})),
    "a stop text that is none": generate(int32(1) + GREEDY + options(stop=[1])),
    "an empty stop text": generate(int32(1) + GREEDY + options(stop=[""])),
    "half a character in a grammar": generate(
        int32(1) + GREEDY + b'{"grammar": {"kind": "regex", "source": "\\ud800"}}'
    ),
    "half a character to stop at": generate(int32(1) + GREEDY + b'{"stop": ["\\ud800"]}'),
    "too many stop texts": generate(int32(1) + GREEDY + options(stop=["a"] * 65)),
    "a stop text that is too long": generate(int32(1) + GREEDY + options(stop=["a" * 1025])),
    "a grammar without a source": generate(int32(1) + GREEDY + options(grammar={"kind": "json"})),
    "a grammar of an unknown kind": generate(int32(1) + GREEDY + options(grammar={"kind": "x", "source": "x"})),
    "a grammar that is none": generate(int32(1) + GREEDY + options(grammar={"kind": "regex", "source": "("})),
    "a draft without numbers": generate(int32(1) + GREEDY + options(draft={"max_tokens": "8", "min_match": 2})),
    "a draft that is too long": generate(int32(1) + GREEDY + options(draft={"max_tokens": 65, "min_match": 2})),
    "an end that is neither": generate(int32(1) + GREEDY + options(stop_at_end="no")),
    "a deadline of no time": generate(int32(1) + GREEDY + options(deadline_us=0)),
    "a deadline that is no number": generate(int32(1) + GREEDY + options(deadline_us=True)),
    "a deadline beyond 63 bits": generate(int32(1) + GREEDY + options(deadline_us=1 << 63)),
    "a negative number of tokens to make": generate(int32(1) + GREEDY, args=(1, 0, -1, 0)),
    "a priority beyond the limits": generate(int32(1) + GREEDY, args=(1, 0, 1, -101)),
    "no tokens": generate(GREEDY, args=(0, 0, 1, 0)),
    "a file that is open for reading": generate(int32(1) + GREEDY, handle=2),
}


@pytest.mark.parametrize("request_", WRONG_GENERATIONS.values(), ids=WRONG_GENERATIONS.keys())
def test_a_generation_that_is_wrong_is_answered_by_an_error_and_appends_nothing(bench, request_):
    answers = bench.send(request_)
    assert the_error(answers).errno in {errno.EINVAL, errno.EACCES}
    assert len(answers.replies[1]) == 1
    assert bench.length == 0


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_message_surprises_the_gate(bench, caplog, data):
    """A request with some changed bytes, flags or numbers is answered once, and nothing fails inside the daemon."""
    right = [
        pred(
            int32(1, 2, 3) + MASK + reduction_block(2, [1], GREEDY),
            flags=ROWS_ALL | MASKED | REDUCED,
            args=(3, 0, 0, 0),
        ),
        pred(int32(1, 2, 3, 0), flags=ROWS_NONE, args=(3, 1, 0, 0)),
        batch(2, GOOD * 2),
        generate(
            int32(1, 2) + GREEDY + options(stop=["a"], draft={"max_tokens": 3, "min_match": 1}), args=(2, 0, 4, 0)
        ),
    ]
    request = data.draw(st.sampled_from(right))
    payload = bytearray(request.payload)
    for _ in range(data.draw(st.integers(0, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)) | st.just(len(payload)))
    numbers = st.integers(-3, 5) | st.integers(-(1 << 63), (1 << 63) - 1)
    args = tuple(data.draw(st.just(arg) | numbers) for arg in request.args)
    if request.op is Op.GENERATE and not 0 < args[2] < 50:
        args = (*args[:2], 4, args[3])  # a context full of tokens takes a second
    flags = data.draw(st.just(request.flags) | st.integers(0, 63))
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        answers = bench.send(request._replace(payload=bytes(payload[:cut]), args=args, flags=flags))
    assert not caplog.records
    assert answers.over == {1}


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
    assert sum(map(len, tokens_of(answers))) == bench.length - 2000 + 1
    assert answers.replies[1][-2][0] == (0, bench.length)


def test_a_cancelled_generation_says_so_and_where_the_file_is(bench):
    requests = [
        generate(int32(1) + GREEDY + options(stop_at_end=False), args=(1, 0, 0, 0), number=5),
        Request(Op.CANCEL, 0, 6, 0, (5, 0, 0, 0), b""),
    ]
    answers = bench.send(*requests)
    args, _, error = answers.replies[5][-1]
    assert error is None or error.errno == errno.ECANCELED
    if error is None:
        assert args[1:3] == (bench.length, Finish.CANCELLED)


def test_a_cancelled_pred_appends_nothing_and_gives_its_slots_back(bench):
    answers = bench.send(
        pred(int32(*[1] * 40), flags=ROWS_ALL, args=(40, 0, 0, 0), number=5),
        Request(Op.CANCEL, 0, 6, 0, (5, 0, 0, 0), b""),
    )
    assert the_error(answers, 5).errno == errno.ECANCELED
    assert bench.length == 0
    assert len(answers.free) == NUM_SLOTS


def test_a_call_that_ends_early_leaves_nothing_of_its_attention(bench):
    tokens = int32(*[1] * 2000) + attention_block("entries", "layer")
    asking = pred(tokens, flags=ASKS, args=(2000, 0, 0, 0), number=5)
    answers = bench.send(asking, Request(Op.CANCEL, 0, 6, 0, (5, 0, 0, 0), b""))
    assert the_error(answers, 5).errno == errno.ECANCELED
    late = asking._replace(args=(2000, 0, 1, 0))
    assert the_error(bench.send(late), 5).errno == errno.ETIMEDOUT
    assert bench.length == 0
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is AttentionMass]


def test_a_cancelled_batch_is_told_call_by_call(bench):
    parts = frame(pred(int32(1, 2), args=(2, 0, 0, 0))) * 3
    answers = bench.send(batch(3, parts, number=5), Request(Op.CANCEL, 0, 6, 0, (5, 0, 0, 0), b""))
    (args, payload, error) = answers.replies[5][0]
    assert (args, error) == ((3,), None)
    assert struct.unpack_from("=Ii", payload, 0)[1] == errno.ECANCELED
    assert bench.length == 0
    assert len(answers.free) == NUM_SLOTS


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
def test_what_a_program_sent_is_freed_when_it_is_answered(bench, request_):
    bench.send(request_)
    assert kept_of_calls() == []


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("request_", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("has_slots", [True, False])
def test_what_a_program_sent_is_freed_when_it_goes(bench, request_, has_slots):
    """The program has one call that is ready and one behind it, or both wait for slots."""

    async def main():
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

    trio.run(main)
    bench.fs.check()
    assert kept_of_calls() == []
