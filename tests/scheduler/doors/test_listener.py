"""Admission of connections: handshakes that are never finished, users that want every connection, and descriptors."""

import errno
import math
import mmap
import os
import resource
import socket
import weakref
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from libsym.abi import Op
from libsym.channel.handshake import GREETING, welcome
from libsym.channel.server import Request
from libsym.errors import SymError
from scheduler.doors.listener import GREETING_TIMEOUT_S, MAX_HANDSHAKES, MAX_LIPS, Listener, bind
from tests.scheduler.doors.houses import House

ALONE = MAX_HANDSHAKES // 2
"""Handshakes that one user may have under way if there is no other."""


class Crowded(House):
    async def try_to_get_in(self):
        return await self.answer(self.client(greeting=GREETING))

    async def is_full(self, num, what):
        """Require that the user has all of what one user may have."""
        refused = await self.try_to_get_in()
        assert isinstance(refused, SymError)
        assert refused.errno == errno.EAGAIN
        assert f"uid {os.getuid()} has {num} of the daemon's {what}" in str(refused)

    async def has_room_again(self):
        while isinstance(await self.try_to_get_in(), SymError):
            pass

    async def fill(self):
        """Begin all handshakes that one user may have under way."""
        connections = [self.client(greeting=b"SYM") for _ in range(ALONE)]
        await self.is_full(ALONE, f"{MAX_HANDSHAKES} handshakes")
        return connections


@pytest.fixture
def house(tmp_path):
    return Crowded(tmp_path)


@pytest.fixture
def in_time(house):
    house.clock = trio.testing.MockClock(autojump_threshold=0.05)


async def test_one_user_s_handshakes_leave_room_for_those_of_others_until_they_end(house, caplog):
    await house.fill()
    for _ in range(50):
        assert isinstance(await house.try_to_get_in(), SymError)
    assert len([each for each in caplog.messages if "connection refused" in each]) <= 2, "a crowd fills no log"
    house.clients.close()
    await house.has_room_again()


async def test_a_client_that_does_not_greet_in_time_is_told_so_and_leaves_its_place(house, in_time):
    silent, began_s = await house.fill(), trio.current_time()
    told = [await house.answer(each) for each in silent]
    assert {(each.errno, str(each)) for each in told} == {
        (errno.ETIMEDOUT, "3 of a greeting's 16 bytes came in 5 s: connect again")
    }
    assert trio.current_time() <= began_s + GREETING_TIMEOUT_S + 1
    assert await house.try_to_get_in() == welcome()


@pytest.mark.slow
async def test_one_user_s_connections_leave_room_for_those_of_others(house):
    for _ in range(MAX_LIPS // 2):
        assert await house.try_to_get_in() == welcome()
    await house.is_full(MAX_LIPS // 2, f"{MAX_LIPS} connections")
    house.clients.close()
    await house.has_room_again()


def most_open():
    return max(int(each) for each in os.listdir("/proc/self/fd"))  # noqa: PTH208 - whatever others have open


def test_connections_leave_descriptors_to_the_mount(tmp_path):
    house, before = Crowded(tmp_path, frozenset({os.getuid()})), resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 400 + most_open()

    async def scenario():
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            while not isinstance(answer := await house.try_to_get_in(), SymError):
                assert len(house.listener.lips) < 200
            assert answer.errno == errno.EAGAIN
            assert f"of its {limit} descriptors open, and keeps the rest for the mount" in str(answer)
            assert limit - most_open() >= 90, "a quarter, but for what this test needs itself"
            await house.try_to_get_in()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    house.run_test(scenario)


def test_a_burst_of_connections_finds_room_while_the_daemon_is_busy(tmp_path):
    with bind(tmp_path / "socket"), ExitStack() as clients:
        for _ in range(300):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect(str(tmp_path / "socket"))


def test_a_daemon_whose_queue_is_full_is_a_live_one(tmp_path):
    with bind(tmp_path / "socket") as listening, ExitStack() as clients:
        listening.listen(0)
        first, second = (clients.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        first.connect(str(tmp_path / "socket"))
        second.setblocking(False)
        with pytest.raises(BlockingIOError):
            second.connect(str(tmp_path / "socket"))
        with pytest.raises(SymError, match="a daemon already listens"):
            bind(tmp_path / "socket")


def hang_up(connection, _region, _doorbell):
    connection.close()


def break_ring(_connection, region, doorbell):
    with mmap.mmap(region, 0) as memory:
        memory[64:4096] = b"\xff" * (4096 - 64)
    os.eventfd_write(doorbell, 1)


@pytest.mark.slow
@pytest.mark.parametrize("end", [hang_up, break_ring])
async def test_a_connection_that_has_ended_is_in_no_cycle(house, no_collector, end):
    """The collector of garbage looks at objects once where they are many: a cycle of older ones stays for good."""
    connection = house.client(greeting=GREETING)
    await trio.lowlevel.wait_readable(connection)
    _, fds, _, _ = socket.recv_fds(connection, 4096, 3)
    [lip] = house.listener.lips
    ended = weakref.ref(lip.channel)
    del lip
    end(connection, *fds[:2])
    with trio.fail_after(5):
        await house.gate.saw_one_off.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert ended() is None
    for fd in fds:
        os.close(fd)


class OneRing:
    """The channel of a program that has said all it will say."""

    is_full = False

    def __init__(self, requests, doorbell):
        self._requests = requests
        self.doorbell = doorbell

    def receive(self, _count):
        requests, self._requests = self._requests, []
        return requests

    def arm(self):
        return True


def test_calls_that_take_long_let_others_have_their_turn_between_them():
    order, clock = [], trio.testing.MockClock()
    lip: Any = SimpleNamespace(slots=SimpleNamespace(serve=lambda: None, deadline=math.inf))
    gate: Any = SimpleNamespace(receive=lambda lip, most: lip.channel.receive(most), handle=lambda *_: handle())
    listener = Listener(gate, 16)

    def handle():
        order.append("call")
        clock.jump(1)

    async def other():
        while True:
            order.append("other")
            await trio.lowlevel.checkpoint()

    async def main():
        doorbell, other_end = os.pipe()
        lip.channel = OneRing([Request(Op.STAT, 0, number, 0, (0, 0, 0, 0), b"") for number in range(4)], doorbell)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            nursery.start_soon(listener._take_calls, lip, nursery)
            while order.count("call") < 4:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        os.close(doorbell)
        os.close(other_end)

    trio.run(main, clock=clock)
    turns = "".join("c" if each == "call" else "o" for each in order).strip("o")
    assert turns.count("o") >= 2, turns  # each round of trio's has a turn of each task, in any order
