"""The table of flock(2): who gets a lock, and when."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable

import pytest
import trio
import trio.testing

from kvfs.names.locks import SOME_HOLDERS, FileLocks
from libsym.errors import SymError

FILE = 7


@pytest.fixture
def locks() -> FileLocks:
    return FileLocks()


def would_block(locks: FileLocks, owner: str, *, exclusive: bool) -> bool:
    try:
        locks.acquire_nowait(FILE, owner, exclusive=exclusive)
    except SymError as error:
        return error.errno == errno.EWOULDBLOCK
    return False


def test_shared_locks_admit_each_other_and_exclude_an_exclusive_one(locks: FileLocks) -> None:
    assert not would_block(locks, "a", exclusive=False)
    assert not would_block(locks, "b", exclusive=False)
    assert would_block(locks, "c", exclusive=True)
    locks.release(FILE, "a")
    assert would_block(locks, "c", exclusive=True)
    locks.release(FILE, "b")
    assert not would_block(locks, "c", exclusive=True)
    assert would_block(locks, "a", exclusive=False)


def test_what_nobody_holds_or_wants_is_forgotten(locks: FileLocks) -> None:
    locks.acquire_nowait(FILE, "a", exclusive=True)
    assert would_block(locks, "b", exclusive=True)
    locks.release(FILE, "b")  # held nothing
    assert len(locks) == 1
    locks.release(FILE, "a")
    assert len(locks) == 0


def test_a_conversion_that_would_block_loses_the_lock_as_flock_does(locks: FileLocks) -> None:
    locks.acquire_nowait(FILE, "a", exclusive=False)
    locks.acquire_nowait(FILE, "b", exclusive=False)
    assert would_block(locks, "a", exclusive=True)
    assert not would_block(locks, "b", exclusive=True)  # alone now


async def _acquire(locks: FileLocks, owner: str, exclusive: bool, order: list[str]) -> None:
    await locks.acquire(FILE, owner, exclusive=exclusive)
    order.append(owner)


def test_waiters_are_served_in_order_and_readers_together() -> None:
    async def main() -> None:
        locks, order = FileLocks(), list[str]()
        locks.acquire_nowait(FILE, "holder", exclusive=True)
        async with trio.open_nursery() as nursery:
            for owner, exclusive in (("r1", False), ("r2", False), ("w", True), ("r3", False)):
                nursery.start_soon(_acquire, locks, owner, exclusive, order)
                await trio.testing.wait_all_tasks_blocked()
            assert not order
            locks.release(FILE, "holder")
            await trio.testing.wait_all_tasks_blocked()
            assert sorted(order) == ["r1", "r2"]  # r3 came after the writer, which must not starve
            locks.release(FILE, "r1")
            locks.release(FILE, "r2")
            await trio.testing.wait_all_tasks_blocked()
            assert order[2:] == ["w"]
            locks.release(FILE, "w")
        assert order[3:] == ["r3"]

    trio.run(main)


def test_two_waiters_of_one_open_file_get_the_lock_together() -> None:
    async def main() -> None:
        locks, order = FileLocks(), list[str]()
        locks.acquire_nowait(FILE, "holder", exclusive=True)
        async with trio.open_nursery() as nursery:
            for owner in ("a", "b", "a"):
                nursery.start_soon(_acquire, locks, owner, True, order)
                await trio.testing.wait_all_tasks_blocked()
            locks.release(FILE, "holder")
            await trio.testing.wait_all_tasks_blocked()
            assert order == ["a", "a"]
            locks.release(FILE, "a")
        assert order == ["a", "a", "b"]

    trio.run(main)


def test_a_waiter_that_gives_up_leaves_the_queue() -> None:
    async def main() -> None:
        locks, order = FileLocks(), list[str]()
        locks.acquire_nowait(FILE, "holder", exclusive=False)
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def writer() -> None:
                with scope:
                    await locks.acquire(FILE, "w", exclusive=True)

            nursery.start_soon(writer)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(_acquire, locks, "r", False, order)
            await trio.testing.wait_all_tasks_blocked()
            assert not order
            scope.cancel()
        assert order == ["r"]
        locks.release(FILE, "r")
        locks.release(FILE, "holder")
        assert len(locks) == 0

    trio.run(main)


def test_what_an_owner_that_leaves_waited_for_is_granted_to_the_next_at_once() -> None:
    async def main() -> None:
        locks = FileLocks()
        locks.acquire_nowait(FILE, "holder", exclusive=True)
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def wait() -> None:
                with scope:
                    await locks.acquire(FILE, "gone", exclusive=True)

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            # All before the wait has noticed.
            locks.leave(FILE, "gone")
            scope.cancel()
            locks.release(FILE, "holder")
            assert not would_block(locks, "holder", exclusive=True)
            locks.release(FILE, "holder")
            assert not would_block(locks, "gone", exclusive=True)
            await trio.testing.wait_all_tasks_blocked()
            assert would_block(locks, "holder", exclusive=True), "the wait that was over took the lock of its owner"
        locks.release(FILE, "gone")
        assert len(locks) == 0

    trio.run(main)


def test_a_wait_that_was_cancelled_takes_nothing_from_who_has_the_lock_now(locks: FileLocks) -> None:
    async def scenario() -> None:
        scope = trio.CancelScope()

        async def wait() -> None:
            with scope:
                await locks.acquire(FILE, "b", exclusive=True)

        async with trio.open_nursery() as nursery:
            locks.acquire_nowait(FILE, "a", exclusive=True)
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            # All before the wait has noticed: it is granted the lock and gives it back, and another takes it.
            locks.release(FILE, "a")
            locks.release(FILE, "b")
            locks.acquire_nowait(FILE, "c", exclusive=True)
        assert would_block(locks, "d", exclusive=True)

    trio.run(scenario)


def seconds(what: Callable[[int], None], numbers: Iterable[int]) -> float:
    """Return the processor time of a function for each number."""
    numbers = list(numbers)
    before_s = time.process_time()
    for number in numbers:
        what(number)
    return (time.process_time() - before_s) / len(numbers)


def test_a_lock_costs_the_same_beside_ten_thousand_that_share_it(locks: FileLocks) -> None:
    """Each looked at all of them before: forty times as long."""
    few = seconds(lambda owner: locks.acquire_nowait(FILE, owner, exclusive=False), range(500))
    seconds(lambda owner: locks.acquire_nowait(FILE, owner, exclusive=False), range(500, 10_000))
    many = seconds(lambda owner: locks.acquire_nowait(FILE, owner, exclusive=False), range(10_000, 10_500))
    refused = seconds(lambda _: would_block(locks, "other", exclusive=True), range(500))
    assert len(locks.holders(FILE)) == SOME_HOLDERS
    released = seconds(lambda owner: locks.release(FILE, owner), range(9_000))
    assert max(many, refused, released) < 8 * few


def test_a_release_costs_the_same_beside_thousands_that_wait() -> None:
    async def main() -> None:
        locks, order = FileLocks(), list[str]()
        locks.acquire_nowait(FILE, "holder", exclusive=True)
        async with trio.open_nursery() as nursery:
            for number in range(4_000):
                nursery.start_soon(_acquire, locks, f"{number}", True, order)
            await trio.testing.wait_all_tasks_blocked()
            locks.release(FILE, "holder")
            costs = []
            for number in range(4_000):
                costs.append(seconds(lambda owner: locks.release(FILE, owner), locks.holders(FILE)))
                if number % 500 == 499:
                    await trio.testing.wait_all_tasks_blocked()
        assert len(order) == 4_000
        assert len(locks) == 0
        assert sum(costs[:500]) < 8 * sum(costs[-500:])

    trio.run(main)
