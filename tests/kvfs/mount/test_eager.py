"""Coroutines that run at once and become tasks only where they must wait."""

import threading

import pytest
import trio
import trio.testing

from kvfs.mount.eager import LEFT, Eager, Mutex


@pytest.fixture
def eager() -> Eager:
    return Eager()


async def test_waiting_without_leaving_is_a_defect_that_is_named(eager: Eager) -> None:
    async def value() -> int:
        return 3

    async def yields() -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(AssertionError, match="before it has left"):
        eager.start(yields())
    assert eager.start(value()) == 3, "and others go on"


async def test_a_mutex_serves_in_order_of_arrival(eager: Eager) -> None:
    mutex, order = Mutex(eager), list[int]()

    async def use(number: int) -> None:
        async with mutex:
            order.append(number)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery, mutex:
        for number in range(5):
            started = use(number)
            assert eager.start(started) is LEFT
            nursery.start_soon(eager.finish, started)
            await trio.testing.wait_all_tasks_blocked()
    assert order == list(range(5))
    assert not mutex.held


async def test_who_gives_up_waiting_for_a_mutex_is_left_out(eager: Eager) -> None:
    mutex, order = Mutex(eager), list[str]()

    async def use(name: str, scope: trio.CancelScope) -> None:
        with scope:
            async with mutex:
                order.append(name)

    async with trio.open_nursery() as nursery, mutex:
        scopes = [trio.CancelScope() for _ in range(3)]
        for name, scope in zip("abc", scopes, strict=True):
            nursery.start_soon(use, name, scope)
            await trio.testing.wait_all_tasks_blocked()
        scopes[1].cancel()
        await trio.testing.wait_all_tasks_blocked()
    assert order == ["a", "c"]
    assert not mutex.held


async def test_long_jobs_of_one_account_hold_up_no_other(eager: Eager) -> None:
    ends = threading.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(eager.long_job, 1, lambda _checkpoint: ends.wait())
        await trio.testing.wait_all_tasks_blocked()
        try:
            with trio.fail_after(10):
                assert await eager.long_job(2, lambda _checkpoint: "done") == "done"
        finally:
            ends.set()
