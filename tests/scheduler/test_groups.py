"""Batches that the core begins: their calls are answered together, however each of them ends."""

import errno
import struct
from contextlib import contextmanager
from functools import partial

import pytest

from libsym._channel import lib as channel
from libsym.abi import REDUCED, REQUEST_STRUCT, ROWS_LAST, Op
from libsym.errors import StepFailed
from libsym.rows.reduced import reduction_block
from scheduler._loop import lib
from scheduler.batch import group, stays
from tests.scheduler.bench import VOCAB_SIZE
from tests.scheduler.test_served_calls import ANN
from tests.scheduler.test_stays import OneSide, fork, length

CANCELLED = errno.ECANCELED


def batch(*handles, tokens=(5,), block=b""):
    """PRED_BATCH; `block`: a reduction, of each call."""
    payload = struct.pack(f"={len(tokens)}i", *tokens) + block
    size, args = REQUEST_STRUCT.size + len(payload), (len(tokens), 0, 0, 0)
    head = partial(REQUEST_STRUCT.pack, size, Op.PRED, 0, ROWS_LAST | (REDUCED if block else 0), 0, 0)
    frames = (head(each, *args) + payload for each in handles)
    padded = b"".join(frame.ljust(-(-len(frame) // 64) * 64, b"\0") for frame in frames)
    return Op.PRED_BATCH, 0, 0, (len(handles), 0, 0, 0), padded


class Batches(OneSide):
    """A program that has branches of one file, and calls in batches."""

    def __init__(self, path, block):
        super().__init__(path)
        self.block = block

    def batch(self, *handles, tokens=(5,)):
        return batch(*handles, tokens=tokens, block=self.block)

    async def branches(self, nursery, num, num_entries=10):
        first = await self.branch(nursery, num_entries)
        return [first, *[await self.call(nursery, fork(1)) for _ in range(num - 1)]]

    async def answers(self, frame):
        """The answers of the calls of the batch that is sent, when it has its own: errors, or lengths."""
        found = []
        await self.until(lambda: found.extend(self.replies(self.lip, [frame])) or found)
        ((number, code, _, args, calls),) = found
        assert (number, code, args[0], [each[0] for each in calls]) == (1, 0, len(calls), list(range(len(calls))))
        return [code or answer[0][-2] for _, code, answer in calls]

    async def ask_batch(self, nursery, *handles, tokens=(5,)):
        frame = self.batch(*handles, tokens=tokens)
        self.send(self.lip, [frame])
        self.handle_all(self.lip, nursery)
        return await self.answers(frame)

    async def lengths(self, nursery, handles):
        return [(await self.ask(self.lip, nursery, length(each)))[0][3][1] for each in handles]

    @property
    def num_begun(self):
        return int(self.batches.gate.num_calls[Op.PRED_BATCH])


@pytest.fixture(params=["rows", "numbers"])
def side(tmp_path, request):
    return Batches(tmp_path, b"" if request.param == "rows" else reduction_block(top_k=2, named=[1]))


def test_calls_of_several_tokens_go_on_together(side):
    async def scenario(nursery):
        handles = await side.branches(nursery, 3)
        assert await side.ask_batch(nursery, *handles, tokens=range(32)) == [42, 42, 42]
        assert await side.ask_batch(nursery, *handles[1:]) == [43, 43]
        assert await side.ask_batch(nursery, *reversed(handles)) == [44, 44, 43]
        assert side.num_begun == 3
        assert len(side.batches._run.stays) == 3
        used = side.lip.program.used
        side.batches.sync()
        assert (used.tokens_in, used.tokens_out, used.calls) == (10 + 3 * 32 + 5, 3 + 5, 1 + 3 + 5)

    side.play(scenario)


@pytest.mark.parametrize("goes_on", [False, True])
def test_calls_whose_step_fails_are_told_so_in_the_answer(side, goes_on):
    async def scenario(nursery):
        handles = await side.branches(nursery, 3)
        if goes_on:
            await side.ask_batch(nursery, *handles[:2])
        before = await side.lengths(nursery, handles)
        await side.computing(nursery, asked := side.batch(*handles))
        side.steps.failure = RuntimeError("no step")
        side.steps.gate.set()
        assert await side.answers(asked) == [StepFailed("").errno] * 3
        side.steps.failure = None
        assert await side.lengths(nursery, handles) == before
        assert await side.ask_batch(nursery, *handles) == [each + 1 for each in before]

    side.play(scenario)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_batch_that_is_cancelled_appends_nothing(side, goes_on):
    async def scenario(nursery):
        handles = await side.branches(nursery, 3)
        if goes_on:
            await side.ask_batch(nursery, *handles[1:])
        before = await side.lengths(nursery, handles)
        await side.computing(nursery, asked := side.batch(*handles))
        side.send(side.lip, [(Op.PING, 0, 0, (0, 0, 0, 0), b""), (Op.CANCEL, 0, 0, (1, 0, 0, 0), b"")])
        side.handle_all(side.lip, nursery)
        side.replies(side.lip)
        side.steps.gate.set()
        assert await side.answers(asked) == [CANCELLED] * 3
        assert await side.lengths(nursery, handles) == before

    side.play(scenario)


def test_files_may_be_looked_at_while_they_are_computed(side):
    async def scenario(nursery):
        handles = await side.branches(nursery, 3)
        await side.computing(nursery, asked := side.batch(*handles))
        assert side.look_at(side.lip, handles[1]) == 10
        side.steps.gate.set()
        assert await side.answers(asked) == [11, 11, 11]
        assert await side.ask_batch(nursery, *handles) == [12, 12, 12]

    side.play(scenario)


@pytest.mark.parametrize("is_seen", [False, True])
def test_an_answer_that_finds_no_room_is_sent_later(side, is_seen):
    async def scenario(nursery):
        handles = await side.branches(nursery, 3)
        await side.computing(nursery, asked := side.batch(*handles))
        server = side.lip.channel.memory[0]
        channel.sym_server_set_backlog(server, 1)
        if is_seen:
            side.look_at(side.lip, handles[0])
        side.steps.gate.set()
        assert await side.answers(asked) == [11, 11, 11]
        channel.sym_server_set_backlog(server, 0)
        assert await side.ask_batch(nursery, *handles) == [12, 12, 12]

    side.play(scenario)


def test_who_has_no_room_for_a_batch_is_refused_it(side):
    async def scenario(nursery):
        handles = await side.branches(nursery, 3)
        holdings = side.fs.pool.accounts.of(ANN.uid).holdings
        for room, code in ((100, errno.EDQUOT), (1 << 20, 0)):
            holdings.core.limit_bytes = holdings.num_bytes + room
            ((_, found, _, _, _),) = await side.ask(side.lip, nursery, side.batch(*handles))
            assert found == code
            assert side.num_begun == (code == 0)

    side.play(scenario)


@contextmanager
def counted(monkeypatch):
    """Count what is abandoned of groups."""
    found = []

    class Library:
        def __getattr__(self, name):
            return getattr(lib, name)

        def sym_group_abandon(self, each):
            found.append(each)
            lib.sym_group_abandon(each)

    monkeypatch.setattr(group, "lib", Library())
    monkeypatch.setattr(stays, "lib", Library())
    yield found


def test_a_batch_of_a_program_that_goes_is_nobodys(side, monkeypatch):
    async def scenario(nursery):
        handles = await side.branches(nursery, 3)
        await side.ask_batch(nursery, handles[0])
        await side.computing(nursery, side.batch(*handles))
        nursery.start_soon(side.gate.see_off, side.lip)
        side.lip = side.lips[1]
        await side.until(lambda: not side.batches._run.stays)
        with counted(monkeypatch) as abandoned:
            side.steps.gate.set()
            await side.until(lambda: len(abandoned) == 3)

    side.play(scenario)


@pytest.mark.parametrize(
    ("frame", "is_begun"),
    [
        (lambda handles: batch(*handles), True),
        (lambda handles: batch(*handles, handles[0]), False),
        (lambda handles: batch(*handles, 1), False),
        (lambda handles: batch(*handles, 99), False),
        (lambda handles: batch(*handles * 22), False),
        (lambda handles: batch(*handles, tokens=[5] * 33), False),
        (lambda handles: batch(*handles, tokens=[-1]), False),
        (lambda handles: batch(*handles, block=reduction_block(1)), True),
        (lambda handles: batch(*handles, block=reduction_block(1)[:-1]), False),
        (lambda handles: batch(*handles, block=reduction_block(1, [VOCAB_SIZE])), False),
        (lambda handles: batch(*handles, block=reduction_block(1, [5] * 1021)), False),
        (lambda handles: (*batch(*handles)[:3], (4, 0, 0, 0), batch(*handles)[4]), False),
        (lambda handles: (*batch(*handles)[:3], (2, 0, 0, 0), batch(*handles)[4]), False),
    ],
)
def test_a_batch_begins_as_a_whole_or_is_the_gates(tmp_path, frame, is_begun):
    side = Batches(tmp_path, b"")

    async def scenario(nursery):
        handles = await side.branches(nursery, 3)
        num_slots = side.lip.channel.num_held_slots
        await side.ask(side.lip, nursery, frame(handles))
        assert side.num_begun == is_begun
        assert side.lip.channel.num_held_slots == num_slots

    side.play(scenario)


def spoiled(step, computed):
    """A step whose rows are no numbers."""
    step(computed)
    for row in (row for chunk in computed.chunks for row in chunk.rows):
        row[0] = float("nan")


@pytest.mark.parametrize("is_batch", [False, True])
def test_a_row_that_is_no_distribution_is_told_and_its_entries_are_there(tmp_path, monkeypatch, is_batch):
    side = Batches(tmp_path, reduction_block(top_k=2))

    async def scenario(nursery):
        handles = await side.branches(nursery, 2)
        monkeypatch.setattr(side.steps.decoder, "step", partial(spoiled, side.steps.decoder.step))
        if is_batch:
            assert await side.ask_batch(nursery, *handles) == [errno.EINVAL] * 2
        else:
            payload = struct.pack("=i", 5) + side.block
            call = Op.PRED, ROWS_LAST | REDUCED, handles[0], (1, 0, 0, 0), payload
            assert [code for _, code, *_ in await side.ask(side.lip, nursery, call)] == [errno.EINVAL]
        assert await side.lengths(nursery, handles) == [11, 11 if is_batch else 10]

    side.play(scenario)
