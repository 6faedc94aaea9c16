"""Calls that wait for result slots keep their place among the calls on their file, and end in their place."""

import errno
import inspect
import struct
from functools import partial

import pytest
import trio
import trio.testing

from libsym.abi import ROWS_ALL, ROWS_LAST, ROWS_NONE, Op
from libsym.channel.server import Request
from libsym.errors import BatchFailed, NoBuffers
from scheduler.batch.policy import StepLimits
from tests.scheduler.appended import batch, frame, int32
from tests.scheduler.bench import ME, Bench

NOW = (1, 0, 0, 0)


class Two(Bench):
    """Two programs that have both of two files open: `shared` is handle 1, `other` handle 2."""

    def run_test(self, scenario):
        async def main():
            self.lips = [self.lip(), self.lip()]
            self.here = [*self.lips]
            for name in ("shared.kv", "other.kv"):
                self.lips[0].add(self.fs.kv_create(ME, name))
                self.lips[1].add(self.fs.kv_open(ME, name, write=True))
            self.shared, self.other = (self.lips[0].file(handle).table for handle in (1, 2))
            async with trio.open_nursery() as self.nursery:
                await scenario()
            while self.here:
                await self.see_off_first()
            assert self.batches.num_waiting == 0

        super().run_test(main)

    async def see_off_first(self):
        await self.gate.see_off(self.here.pop(0))

    def ask(self, number, token, *, of=0, handle=1, flags=ROWS_LAST, args=NOW):
        self.send(Request(Op.PRED, flags, number, handle, args, int32(token)), of=of)

    def send(self, request, *, of=0):
        self.gate.handle(self.lips[of], request, self.nursery)

    def hold_all(self, of=0):
        """The program keeps all of its rows."""
        self.lips[of].channel.free.clear()

    def let_go(self, *slots, of=0):
        self.lips[of].channel.free |= set(slots)
        self.lips[of].slots.serve()

    def lose_patience(self):
        self.lips[0].slots.deadline = 0.0
        self.lips[0].slots.serve()

    def errors(self, of=0):
        return self.lips[of].channel.errors

    async def answered(self, number, of=0):
        while number not in self.lips[of].channel.over:  # noqa: ASYNC110 - a channel here has no event
            await trio.sleep(0.001)

    @property
    def tokens(self):
        return self.shared.read()[0].tolist()


@pytest.fixture
def two(tmp_path):
    return Two(tmp_path, limits=StepLimits())


async def test_calls_on_one_file_keep_their_order_where_the_first_waits_for_its_slot(two):
    two.hold_all()
    two.hold_all(of=1)
    two.ask(1, 10)
    two.ask(2, 20, flags=ROWS_NONE)
    two.ask(3, 30, of=1)
    two.let_go(7, of=1)  # one that has its slots before its turn waits for its turn
    await trio.testing.wait_all_tasks_blocked(0.02)
    assert two.tokens == []
    assert two.errors() == two.errors(of=1) == {}
    two.let_go(5)
    for number, of in ((1, 0), (2, 0), (3, 1)):
        await two.answered(number, of)
    assert two.tokens == [10, 20, 30]
    assert two.lips[0].channel.args[1][:2] == (5, 1), "its row is in the slot that became free"


@pytest.mark.parametrize("is_head", [True, False])
@pytest.mark.parametrize("how", ["cancel", "close", "deadline", "patience", "go"])
async def test_a_call_that_ends_while_it_waits_lets_the_next_one_go_on(two, how, is_head):
    two.hold_all()
    if not is_head:
        two.hold_all(of=1)
        two.ask(9, 90, of=1)
    two.ask(1, 10, args=(1, 0, 30_000 if how == "deadline" else 0, 0))
    two.ask(2, 20, of=1, flags=ROWS_NONE)
    ways = {
        "cancel": (partial(two.send, Request(Op.CANCEL, 0, 5, 0, (1, 0, 0, 0), b"")), errno.ECANCELED),
        "close": (partial(two.send, Request(Op.KV_CLOSE, 0, 5, 1, (0, 0, 0, 0), b"")), errno.EBADF),
        "deadline": (partial(two.answered, 1), errno.ETIMEDOUT),
        "patience": (two.lose_patience, errno.ENOBUFS),
        "go": (two.see_off_first, None),
    }
    end, expected = ways[how]
    ended = end()
    if inspect.isawaitable(ended):
        await ended
    assert two.errors().get(1) == expected
    if not is_head:
        two.let_go(3, of=1)
    await two.answered(2, of=1)
    assert two.tokens == ([20] if is_head else [90, 20])
    assert not two.lips[0].slots._waits


async def test_a_call_that_gets_slots_as_its_file_is_closed_goes_on(two):
    """The end of the call in front of it gives them."""
    two.hold_all()
    two.lips[0].channel.free.add(5)
    two.send(Request(Op.PRED, ROWS_ALL, 1, 1, (2, 0, 0, 0), int32(10, 11)))
    two.ask(2, 20)
    assert len(two.lips[0].slots._waits) == 2
    two.send(Request(Op.KV_CLOSE, 0, 3, 1, (0, 0, 0, 0), b""))
    await two.answered(3)
    assert two.errors() == {1: errno.EBADF, 2: 0, 3: 0}
    assert two.tokens == [20]


def part(token, handle=1, deadline_us=0, flags=ROWS_LAST):
    return frame(Request(Op.PRED, flags, 0, handle, (1, 0, deadline_us, 0), int32(token)))


def errnos(reply):
    _, payload, error = reply
    assert error is None
    found, at = [], 0
    while at < len(payload):
        num_bytes, code = struct.unpack_from("=Ii", payload, at)
        found.append(code)
        at += -(-num_bytes // 64) * 64
    return found


async def test_the_calls_of_a_batch_wait_together_in_the_queues_of_their_files(two):
    two.hold_all()
    two.send(batch(3, part(10) + part(11, handle=2) + part(12, flags=ROWS_NONE)))
    two.ask(2, 20, of=1, flags=ROWS_NONE)
    two.let_go(5)  # one is not enough
    await trio.testing.wait_all_tasks_blocked(0.02)
    assert two.tokens == []
    two.let_go(6)
    await two.answered(1)
    await two.answered(2, of=1)
    assert two.tokens == [10, 12, 20]
    assert errnos(two.lips[0].channel.replies[1][0]) == [0, 0, 0]


async def test_a_call_of_a_batch_that_is_late_while_they_wait_gives_its_slot_back(two):
    two.hold_all()
    two.send(batch(2, part(10, deadline_us=1) + part(11)))
    await trio.sleep(0.02)
    two.let_go(5, 6)
    await two.answered(1)
    assert errnos(two.lips[0].channel.replies[1][0]) == [errno.ETIMEDOUT, 0]
    assert two.tokens == [11]
    assert two.lips[0].channel.free == {5}


@pytest.mark.parametrize("is_head", [True, False])
async def test_a_call_of_a_batch_whose_file_was_closed_has_ended_also_for_who_cancels_the_rest(two, is_head):
    """Else the other program's call leaves the queue in its place, and the file is stuck for everybody."""
    two.hold_all()
    two.hold_all(of=1)
    if not is_head:
        two.ask(9, 90, of=1)
    two.send(batch(2, part(10) + part(11, handle=2)))
    two.ask(2, 20, of=1)
    two.send(Request(Op.KV_CLOSE, 0, 5, 1, (0, 0, 0, 0), b""))
    two.send(Request(Op.CANCEL, 0, 6, 0, (1, 0, 0, 0), b""))
    assert errnos(two.lips[0].channel.replies[1][0]) == [errno.EBADF, errno.ECANCELED]
    assert two.errors()[6] == 0
    two.let_go(3, of=1)
    two.let_go(4, of=1)
    await two.answered(2, of=1)
    assert two.tokens == ([20] if is_head else [90, 20])


async def test_a_batch_that_gets_no_slots_fails_as_a_whole_and_appends_nothing(two):
    two.hold_all()
    two.send(batch(2, part(10) + part(11, flags=ROWS_NONE)))
    two.lose_patience()
    ((_, _, error),) = two.lips[0].channel.replies[1]
    assert isinstance(error, NoBuffers)
    assert not isinstance(error, BatchFailed)
    assert two.tokens == []


async def test_files_and_slots_that_cross_come_to_no_deadlock(two):
    """Each program's first call has its last slot, and stands on one file behind the other's, which waits for one."""
    two.lips[0].channel.free = {0}
    two.lips[1].channel.free = {0}
    two.ask(1, 1, handle=2)  # on the other file, with the slot of 0
    two.ask(2, 2)  # on the shared file, without
    two.ask(3, 3, of=1)  # on the shared file behind it, with the slot of 1
    two.ask(4, 4, of=1, handle=2)  # on the other file behind the first, without
    await two.answered(1)
    two.let_go(0)  # the program has seen its row
    await two.answered(2)
    await two.answered(3, of=1)
    two.let_go(0, of=1)
    await two.answered(4, of=1)
    assert two.tokens == [2, 3]
    assert two.other.read()[0].tolist() == [1, 4]
