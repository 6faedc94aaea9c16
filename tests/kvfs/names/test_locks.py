"""The table of flock(2): who gets a lock, and when."""

import errno
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

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


def test_a_conversion_that_would_block_loses_the_lock_as_flock_does(locks: FileLocks) -> None:
    locks.acquire_nowait(FILE, "a", exclusive=False)
    locks.acquire_nowait(FILE, "b", exclusive=False)
    assert would_block(locks, "a", exclusive=True)
    assert not would_block(locks, "b", exclusive=True)  # alone now


async def _acquire(locks: FileLocks, owner: str, exclusive: bool, order: list[str]) -> None:
    await locks.acquire(FILE, owner, exclusive=exclusive)
    order.append(owner)


class Waits:
    """Waits for the lock of a file that "holder" has, in the order in which they were begun."""

    def __init__(self, locks: FileLocks) -> None:
        self.locks = locks
        self.order: list[str] = []
        self.scopes: dict[str, trio.CancelScope] = {}

    def run_test(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run a test while "holder" has the lock. In the end nobody waits, and all locks are given back."""

        async def main() -> None:
            self.locks.acquire_nowait(FILE, "holder", exclusive=True)
            async with trio.open_nursery() as self._nursery:
                await body()
            for owner in self.locks.holders(FILE):
                self.locks.release(FILE, owner)
            assert len(self.locks) == 0

        trio.run(main)

    async def begin(self, owner: str, *, exclusive: bool = True) -> None:
        scope = self.scopes[owner] = trio.CancelScope()

        async def wait() -> None:
            with scope:
                await _acquire(self.locks, owner, exclusive, self.order)

        self._nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
def waits(locks: FileLocks) -> Waits:
    return Waits(locks)


async def test_waiters_are_served_in_order_and_readers_together(waits: Waits, locks: FileLocks) -> None:
    for owner, exclusive in (("r1", False), ("r2", False), ("w", True), ("r3", False)):
        await waits.begin(owner, exclusive=exclusive)
    for released, served in (([], []), (["holder"], ["r1", "r2"]), (["r1", "r2"], ["w"]), (["w"], ["r3"])):
        before = len(waits.order)
        for owner in released:
            locks.release(FILE, owner)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(waits.order[before:]) == served, "r3 came after the writer, which must not starve"


async def test_two_waiters_of_one_open_file_get_the_lock_together(waits: Waits, locks: FileLocks) -> None:
    for owner in ("a", "b", "a"):
        await waits.begin(owner)
    for released, served in (("holder", ["a", "a"]), ("a", ["a", "a", "b"])):
        locks.release(FILE, released)
        await trio.testing.wait_all_tasks_blocked()
        assert waits.order == served


async def test_what_an_owner_that_leaves_waited_for_is_granted_to_the_next_at_once(
    waits: Waits, locks: FileLocks
) -> None:
    await waits.begin("gone")
    # All before the wait has noticed.
    locks.leave(FILE, "gone")
    waits.scopes["gone"].cancel()
    locks.release(FILE, "holder")
    assert not would_block(locks, "holder", exclusive=True)
    locks.release(FILE, "holder")
    assert not would_block(locks, "gone", exclusive=True)
    await trio.testing.wait_all_tasks_blocked()
    assert would_block(locks, "holder", exclusive=True), "the wait that was over took the lock of its owner"


async def test_a_wait_that_was_cancelled_takes_nothing_from_who_has_the_lock_now(
    waits: Waits, locks: FileLocks
) -> None:
    await waits.begin("b")
    waits.scopes["b"].cancel()
    # All before the wait has noticed: it is granted the lock and gives it back, and another takes it.
    locks.release(FILE, "holder")
    locks.release(FILE, "b")
    locks.acquire_nowait(FILE, "c", exclusive=True)
    await trio.testing.wait_all_tasks_blocked()
    assert would_block(locks, "d", exclusive=True)


def seconds(what: Callable[[Any], object], numbers: Iterable[Any]) -> float:
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


async def test_a_release_costs_the_same_beside_thousands_that_wait() -> None:
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
