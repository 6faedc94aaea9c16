"""Result slots: the calls that wait, their order, and the end of a wait."""

import math
import mmap

import pytest
import trio
import trio.testing

from libsym.channel.server import ServerChannel
from libsym.errors import NoBuffers, TooLarge
from scheduler._loop import ffi
from scheduler.connection.slots import PATIENCE_S, Slots

VOCAB_SIZE = 3000
STATES_OFFSET = 4096
SLOTS_WANTED = 460  # offset in struct sym_region


class Connection:
    """A connection whose client is this test: it frees slots where the library would."""

    def __init__(self):
        self.channel = ServerChannel.create(VOCAB_SIZE, region_bytes_limit=1)
        self.region = mmap.mmap(self.channel.fds[0], 0)
        self.slots = Slots(self.channel, ffi.new("sym_connection *"))
        self.given = []

    def run_test(self, main):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))

    def take(self, num_rows, name, is_wanted=lambda: True):
        """Take slots, at once or in order."""

        def then(found):
            self.given.append((name, found))

        found = self.slots.take_now(num_rows)
        if found is None:
            self.slots.wait(num_rows, then, is_wanted)
        else:
            then(found)

    def answer(self, num_rows):
        """Answer a call that has its rows, as the daemon does: from now on the slots are the program's."""
        self.channel.reply(1, num_rows=num_rows)

    async def sleep_past_the_deadline(self):
        """Sleep past the deadline and serve, as the listener does."""
        await trio.sleep_until(self.slots.deadline)
        self.slots.serve()

    def free(self, slot):
        """Free a slot as the client does; return whether the client would have rung."""
        self.region[STATES_OFFSET + 4 * slot] = 0
        rings = self.region[SLOTS_WANTED] == 1
        self.region[SLOTS_WANTED] = 0
        return rings


@pytest.fixture
def connection():
    found = Connection()
    assert found.channel.num_slots == 64
    yield found
    found.channel.close()
    found.region.close()


async def test_free_slots_are_given_at_once_and_waits_are_served_in_order_as_others_become_free(connection):
    for name, num_rows in (("few", 3), ("all", 61)):
        connection.take(num_rows, name)
    assert connection.given == [("few", 0), ("all", 3)]
    assert connection.slots.deadline == math.inf
    connection.given[:] = [("all", 0)]
    connection.take(2, "a")
    connection.take(1, "b")
    assert connection.free(7), "the client is asked to ring"
    connection.slots.serve()
    assert connection.given == [("all", 0)], "a waits for two, and b waits behind a"
    assert connection.free(8), "it is asked again"
    connection.slots.serve()
    assert connection.given[1:] == [("a", 7)]
    connection.channel.free_rows(3, 1)  # by the daemon itself
    connection.slots.serve()
    assert connection.given[2:] == [("b", 3)]
    assert not connection.slots._waits
    assert connection.slots.deadline == math.inf


async def test_a_program_that_frees_nothing_gets_an_error_in_the_end(connection):
    connection.take(64, "all")
    connection.answer(64)
    connection.take(1, "a")
    connection.take(1, "b")
    await trio.sleep(PATIENCE_S * 0.9)
    connection.slots.serve()
    assert len(connection.given) == 1
    await connection.sleep_past_the_deadline()
    assert [name for name, _ in connection.given[1:]] == ["a", "b"]
    assert all(isinstance(found, NoBuffers) for _, found in connection.given[1:])
    assert "drop some Dists" in str(connection.given[1][1])
    for slot in (*range(32), *range(33, 64)):
        connection.free(slot)
    connection.take(40, "big")
    connection.take(1, "small")
    assert len(connection.given) == 3, "in order, while there is hope"
    await connection.sleep_past_the_deadline()
    assert [name for name, _ in connection.given[3:]] == ["big", "small"], "one behind it can have a row"
    assert isinstance(connection.given[3][1], NoBuffers)
    assert connection.given[4][1] == 0


async def test_every_slot_that_moves_begins_the_time_anew(connection):
    connection.take(64, "all")
    connection.answer(64)
    connection.take(8, "a")
    for slot in range(8):
        await trio.sleep(PATIENCE_S * 0.9)
        assert connection.given == [("all", 0)]
        connection.free(slot)
        connection.slots.serve()
    assert connection.given[1:] == [("a", 0)]


async def test_nobody_gives_up_while_a_call_that_has_a_slot_is_not_answered(connection):
    connection.take(1, "slow")
    connection.take(63, "others")
    connection.answer(63)
    connection.take(1, "a")
    for _ in range(5):
        await connection.sleep_past_the_deadline()
    assert len(connection.given) == 2, "the slow call's slot may become free yet"
    connection.answer(1)
    answered_s = trio.current_time()
    while connection.slots._waits:
        await connection.sleep_past_the_deadline()
    assert isinstance(connection.given[2][1], NoBuffers)
    assert trio.current_time() >= answered_s + PATIENCE_S, "the program has had time to look at its row"


async def test_a_slot_that_went_from_hand_to_hand_between_two_looks_has_moved(connection):
    connection.take(64, "all")
    connection.answer(64)
    connection.take(2, "a")
    await trio.sleep(PATIENCE_S * 0.9)
    connection.free(3)
    assert connection.channel.take_rows(1) == 3  # as the run does it
    connection.answer(1)
    await connection.sleep_past_the_deadline()
    assert len(connection.slots._waits) == 1


async def test_more_rows_than_there_are_is_an_error_at_once(connection):
    with pytest.raises(TooLarge):
        connection.take(65, "a")
    connection.take(64, "all")
    connection.take(1, "b")
    connection.take(65, "c")
    connection.free(9)
    connection.slots.serve()
    assert connection.given[1] == ("b", 9)
    assert isinstance(connection.given[2][1], TooLarge), "in its turn"


async def test_a_wait_that_nobody_wants_any_more_lets_the_next_one_through(connection):
    wanted = {"a", "c"}
    connection.take(64, "all")
    for name, num_rows in (("a", 9), ("b", 1), ("c", 8), ("d", 1)):
        connection.take(num_rows, name, lambda name=name: name in {"b", "d"} or name in wanted)
    connection.free(5)
    connection.free(6)
    wanted.clear()
    connection.slots.serve()
    assert connection.given[1:] == [("b", 5), ("d", 6)], "and nobody hears of the others"
    assert connection.slots.deadline == math.inf
