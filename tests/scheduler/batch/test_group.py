"""Batches that the core begins: their calls are answered together, however each of them ends."""

import errno
import struct
from functools import partial

import pytest

from libsym._channel import lib as channel
from libsym.abi import REDUCED, REQUEST_STRUCT, ROWS_LAST, Op
from libsym.errors import StepFailed
from libsym.rows.reduced import reduction_block
from scheduler._loop import lib
from scheduler.batch import group, stays
from tests.scheduler.bench import VOCAB_SIZE
from tests.scheduler.served_bench import ANN, PING, Side, fork, framed, length

CANCELLED = errno.ECANCELED


def batch(*handles, tokens=(5,), block=b""):
    """PRED_BATCH; `block`: a reduction, of each call."""
    payload = struct.pack(f"={len(tokens)}i", *tokens) + block
    size, args = REQUEST_STRUCT.size + len(payload), (len(tokens), 0, 0, 0)
    head = partial(REQUEST_STRUCT.pack, size, Op.PRED, 0, ROWS_LAST | (REDUCED if block else 0), 0, 0)
    frames = (head(each, *args) + payload for each in handles)
    padded = b"".join(frame.ljust(-(-len(frame) // 64) * 64, b"\0") for frame in frames)
    return Op.PRED_BATCH, 0, 0, (len(handles), 0, 0, 0), padded


class Batches(Side):
    """A program that has branches of one file, and calls in batches."""

    def __init__(self, path, block):
        super().__init__(path)
        self.block = block

    def batch(self, *handles, tokens=(5,)):
        return batch(*handles, tokens=tokens, block=self.block)

    async def branches(self, num, num_entries=10):
        first = await self.branch(num_entries)
        return [first, *[await self.call(fork(1)) for _ in range(num - 1)]]

    async def answers(self, frame):
        """The answers of the calls of the batch that is sent, when it has its own: errors, or lengths."""
        ((number, code, _, args, calls),) = await self.answered([frame])
        assert (number, code, args[0], [each[0] for each in calls]) == (1, 0, len(calls), list(range(len(calls))))
        return [code or answer[0][-2] for _, code, answer in calls]

    async def ask_batch(self, *handles, tokens=(5,)):
        frame = self.batch(*handles, tokens=tokens)
        self.send([frame])
        self.handle_all()
        return await self.answers(frame)

    async def lengths(self, handles):
        return [(await self.ask(length(each)))[0][3][1] for each in handles]

    @property
    def num_begun(self):
        return int(self.batches.gate.num_calls[Op.PRED_BATCH])


@pytest.fixture(params=["rows", "numbers"])
def side(tmp_path, request):
    return Batches(tmp_path, b"" if request.param == "rows" else reduction_block(top_k=2, named=[1]))


@pytest.fixture
def numberless(tmp_path):
    return Batches(tmp_path, b"")


async def test_calls_of_several_tokens_go_on_together(side):
    handles = await side.branches(3)
    assert await side.ask_batch(*handles, tokens=range(32)) == [42, 42, 42]
    assert await side.ask_batch(*handles[1:]) == [43, 43]
    assert await side.ask_batch(*reversed(handles)) == [44, 44, 43]
    assert side.num_begun == 3
    assert len(side.batches._run.stays) == 3
    used = side.program.program.used
    side.batches.sync()
    assert (used.tokens_in, used.tokens_out, used.calls) == (10 + 3 * 32 + 5, 3 + 5, 1 + 3 + 5)


@pytest.mark.parametrize("goes_on", [False, True])
async def test_calls_whose_step_fails_are_told_so_in_the_answer(side, goes_on):
    handles = await side.branches(3)
    if goes_on:
        await side.ask_batch(*handles[:2])
    before = await side.lengths(handles)
    await side.computing(asked := side.batch(*handles))
    side.steps.failure = RuntimeError("no step")
    side.steps.gate.set()
    assert await side.answers(asked) == [StepFailed("").errno] * 3
    side.steps.failure = None
    assert await side.lengths(handles) == before
    assert await side.ask_batch(*handles) == [each + 1 for each in before]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_batch_that_is_cancelled_appends_nothing(side, goes_on):
    handles = await side.branches(3)
    if goes_on:
        await side.ask_batch(*handles[1:])
    before = await side.lengths(handles)
    await side.computing(asked := side.batch(*handles))
    side.send([PING, framed(Op.CANCEL, 0, 1)])
    side.handle_all()
    side.replies()
    side.steps.gate.set()
    assert await side.answers(asked) == [CANCELLED] * 3
    assert await side.lengths(handles) == before


@pytest.mark.parametrize("is_seen", [False, True])
async def test_an_answer_that_finds_no_room_is_sent_later(side, is_seen):
    handles = await side.branches(3)
    await side.computing(asked := side.batch(*handles))
    server = side.program.channel.memory[0]
    channel.sym_server_set_backlog(server, 1)
    if is_seen:
        side.look_at(handles[0])
    side.steps.gate.set()
    assert await side.answers(asked) == [11, 11, 11]
    channel.sym_server_set_backlog(server, 0)
    assert await side.ask_batch(*handles) == [12, 12, 12]


async def test_who_has_no_room_for_a_batch_is_refused_it(side):
    handles = await side.branches(3)
    holdings = side.fs.pool.accounts.of(ANN.uid).holdings
    for room, code in ((100, errno.EDQUOT), (1 << 20, 0)):
        holdings.core.limit_bytes = holdings.num_bytes + room
        ((_, found, _, _, _),) = await side.ask(side.batch(*handles))
        assert found == code
        assert side.num_begun == (code == 0)


async def test_a_batch_of_a_program_that_goes_is_nobodys(side, monkeypatch):
    abandoned = []

    class Library:
        def __getattr__(self, name):
            return getattr(lib, name)

        def sym_group_abandon(self, each):
            abandoned.append(each)
            lib.sym_group_abandon(each)

    handles = await side.branches(3)
    await side.ask_batch(handles[0])
    await side.computing(side.batch(*handles))
    side.nursery.start_soon(side.gate.see_off, side.program)
    side.program = side.lips[1]
    await side.until(lambda: not side.batches._run.stays)
    monkeypatch.setattr(group, "lib", Library())
    monkeypatch.setattr(stays, "lib", Library())
    side.steps.gate.set()
    await side.until(lambda: len(abandoned) == 3)


@pytest.mark.slow
async def test_a_batch_begins_as_a_whole_or_is_the_gates(numberless):
    side = numberless
    cases = {
        "whole": lambda handles: batch(*handles),
        "with numbers": lambda handles: batch(*handles, block=reduction_block(1)),
        "one twice": lambda handles: batch(*handles, handles[0]),
        "a file": lambda handles: batch(*handles, 1),
        "no handle": lambda handles: batch(*handles, 9999),
        "another operation": lambda handles: framed(
            Op.PRED_BATCH, 0, 3, payload=batch(*handles)[4].replace(bytes([Op.PRED, 0]), bytes([Op.PING, 0]), 1)
        ),
        "too many": lambda handles: batch(*handles * 22),
        "too long": lambda handles: batch(*handles, tokens=[5] * 33),
        "no token": lambda handles: batch(*handles, tokens=[-1]),
        "a block that is cut": lambda handles: batch(*handles, block=reduction_block(1)[:-1]),
        "a block of no token": lambda handles: batch(*handles, block=reduction_block(1, [VOCAB_SIZE])),
        "a block that is too long": lambda handles: batch(*handles, block=reduction_block(1, [5] * 1021)),
        "more than there are": lambda handles: framed(Op.PRED_BATCH, 0, 4, payload=batch(*handles)[4]),
        "fewer than there are": lambda handles: framed(Op.PRED_BATCH, 0, 2, payload=batch(*handles)[4]),
    }
    for number, (what, frame) in enumerate(cases.items(), 1):
        handles, num_slots = await side.branches(3), side.program.channel.num_held_slots
        await side.ask(frame(handles))
        assert side.num_begun == min(number, 2), what
        assert side.program.channel.num_held_slots == num_slots, what


@pytest.mark.parametrize("is_batch", [False, True])
async def test_a_row_that_is_no_distribution_is_told_and_its_entries_are_there(numberless, monkeypatch, is_batch):
    side, step = numberless, numberless.steps.decoder.step
    side.block = reduction_block(top_k=2)

    def spoiled(computed):
        step(computed)
        for row in (row for chunk in computed.chunks for row in chunk.rows):
            row[0] = float("nan")

    handles = await side.branches(2)
    monkeypatch.setattr(side.steps.decoder, "step", spoiled)
    if is_batch:
        assert await side.ask_batch(*handles) == [errno.EINVAL] * 2
    else:
        call = framed(Op.PRED, handles[0], 1, flags=ROWS_LAST | REDUCED, payload=struct.pack("=i", 5) + side.block)
        assert [code for _, code, *_ in await side.ask(call)] == [errno.EINVAL]
    assert await side.lengths(handles) == [11, 11 if is_batch else 10]
