"""Requests that are put off while the model computes: whose turn it is, by a clock that the test turns."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio
import trio.testing

from kvfs.mount import requests as module
from kvfs.mount import shim
from kvfs.mount.eager import Eager
from kvfs.mount.pace import MAX_BUCKETS, QUANTUM, STAYS_BUSY_S, Pace
from kvfs.mount.requests import Requests
from kvfs.pages.holdings import WEIGHTS, Holdings, Kind

SYBIL, STRANGER = 5000, 9000


class Request:
    """A request as libfuse would hold it."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.answered = trio.Event()
        self.status = 0


class Shim:
    """The C half, which does with requests as C would."""

    LATER = shim.LATER

    def uid(self, request: Request) -> int:
        return request.uid

    def answer(self, request: Request, status: int) -> None:
        request.status = status
        request.answered.set()

    def watch(self, request: Request) -> None:
        pass

    def linger(self, wanted: bool) -> None:
        pass


class Mount:
    """A mount beside a model that is computing."""

    def __init__(self) -> None:
        self.is_busy = True
        self.eager, self.holdings = Eager(), Holdings()
        self._clock = trio.testing.MockClock(rate=1e-3, autojump_threshold=0)
        pace = Pace(lambda: self.is_busy, self._clock.current_time)
        self.requests = Requests(self.eager, pace, holdings=lambda _uid: self.holdings)

    def run_test(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        trio.run(self.requests.serve, body, clock=self._clock)

    def ask(self, uid: int) -> Request:
        request = Request(uid)
        if self.requests.paced(self.requests.answer, lambda: 0, request) != Shim.LATER:
            request.answered.set()
        return request

    def use_up(self, *uids: int) -> None:
        """Ask for each user until a request is put off."""
        for uid in uids:
            while self.ask(uid).answered.is_set():
                pass

    async def requests_are_answered(self) -> None:
        self.is_busy = False
        await trio.sleep(STAYS_BUSY_S)

    async def keep_busy(self, uid: int) -> None:
        while True:
            await self.ask(uid).answered.wait()
            await trio.lowlevel.checkpoint()


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Mount:
    monkeypatch.setattr(module, "shim", Shim())
    return Mount()


async def test_users_who_share_a_bucket_are_answered_in_turn(mount: Mount) -> None:
    """A user keeps every bucket in use, and queues hundreds of requests under another uid."""
    async with trio.open_nursery() as nursery:
        for uid in range(1000, 1000 + MAX_BUCKETS):
            mount.use_up(uid)
            nursery.start_soon(mount.keep_busy, uid)
        mount.use_up(SYBIL)
        queue = [mount.ask(SYBIL) for _ in range(400)]
        for _ in range(3):
            request = mount.ask(STRANGER)
            before = sum(each.answered.is_set() for each in queue)
            await request.answered.wait()
            assert sum(each.answered.is_set() for each in queue) - before <= 2 * QUANTUM
        assert not queue[-1].answered.is_set()
        nursery.cancel_scope.cancel()


async def test_a_user_without_requests_keeps_no_turn_after_a_signal(mount: Mount) -> None:
    mount.use_up(SYBIL)
    first, second = mount.ask(SYBIL), mount.ask(SYBIL)
    assert mount.holdings.core.num_of[Kind.REQUEST] == 3
    for request in (first, second):
        mount.requests.interrupted(request)
        await request.answered.wait()
        assert request.status < 0
    third = mount.ask(SYBIL)
    await third.answered.wait()
    assert third.status == 0
    await mount.requests_are_answered()
    assert mount.holdings.num_bytes == 0


async def test_a_request_that_waits_weighs_what_it_brings_until_it_is_answered(mount: Mount) -> None:
    may_end = trio.Event()

    async def write(fh: int, value: bytes, data: memoryview) -> int:
        await mount.eager.leave()
        await may_end.wait()
        return fh + len(value) + len(data)

    request = Request(SYBIL)
    assert mount.requests.begin(write, request, 1, bytes(65536), memoryview(bytes(1 << 20))) == Shim.LATER
    await trio.testing.wait_all_tasks_blocked()
    assert mount.holdings.num_bytes == WEIGHTS[Kind.REQUEST] + 65536 + (1 << 20)
    may_end.set()
    await request.answered.wait()
    assert (request.status, mount.holdings.num_bytes) == (1 + 65536 + (1 << 20), 0)


async def test_what_was_put_off_is_answered_as_soon_as_the_model_rests(mount: Mount) -> None:
    """However many users share the rate: the next token of each is most of a second away."""
    mount.use_up(*range(1000, 1000 + MAX_BUCKETS + 1))
    requests = [mount.ask(uid) for uid in range(1000, 1000 + MAX_BUCKETS + 1)]
    await trio.sleep(STAYS_BUSY_S)
    mount.is_busy = False
    began_s = trio.current_time()
    for request in requests:
        await request.answered.wait()
    assert trio.current_time() - began_s < 10 * STAYS_BUSY_S
