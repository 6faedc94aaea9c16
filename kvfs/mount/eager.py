"""Eager coroutines: they run at once, and become tasks only if they have to wait.

A request of the kernel arrives as a call from C. Nearly all requests are answered without waiting, and a task for each
request would cost several times as much as the answer. So a handler that might wait is a coroutine, and its first part
runs inside the call from C. Before the handler waits, it calls `await eager.leave()`; from there on it is a task like
any other. The alternative would be to write each handler twice (`read_nowait`, `read`), and to keep the semantics of
both equal.

The rule: an eager coroutine awaits nothing of trio before it has called `leave`. `Mutex` keeps the rule by itself, so a
handler that waits only for a mutex need not call `leave`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType, coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import trio

_Result = TypeVar("_Result")

_LEAVE = object()

LEFT = object()
"""Result of `start` for a coroutine that has to wait."""


@coroutine
def _yield_leave() -> Generator[object, Any, None]:
    yield _LEAVE


@coroutine
def _rest(started: Coroutine[Any, Any, _Result]) -> Generator[Any, Any, _Result]:
    result: _Result = yield from started.__await__()
    return result


class Eager:
    """Starts eager coroutines, on the trio thread."""

    __slots__ = ("_is_starting", "_long_jobs")

    def __init__(self) -> None:
        self._is_starting = False
        self._long_jobs: WeakValueDictionary[int, trio.CapacityLimiter] = WeakValueDictionary()
        """A limiter of long jobs for each account. With one limiter for all accounts, the jobs of one account would
        delay the jobs of other accounts for minutes.
        """

    def start(self, started: Coroutine[Any, Any, object]) -> object:
        """Run the coroutine's first part. Return its result, or `LEFT` if the rest needs `finish`."""
        assert not self._is_starting, "an eager coroutine was started inside another"
        self._is_starting = True
        try:
            trap = started.send(None)
        except StopIteration as end:
            return end.value
        finally:
            self._is_starting = False
        if trap is not _LEAVE:
            started.close()
            raise AssertionError(f"{started} waits for {trap!r} before it has left")
        return LEFT

    async def finish(self, started: Coroutine[Any, Any, _Result]) -> _Result:
        """Run the rest of a coroutine that has left, in the current task."""
        return await _rest(started)

    async def leave(self) -> None:
        """Make the caller a task. From here on, the caller may wait."""
        if self._is_starting:
            await _yield_leave()

    def long_jobs(self, account: int) -> trio.CapacityLimiter:
        """Return the limiter of an account's long jobs. The limit is the number of processors, but at least two."""
        return self._long_jobs.setdefault(account, trio.CapacityLimiter(max(2, os.cpu_count() or 1)))

    async def long_job(self, account: int, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a function in a worker. The function may take minutes, and counts to the limit of `long_jobs`. A
        cancellation takes effect at a checkpoint.

        The function gets a checkpoint as its last argument. The function must call the checkpoint often, and must not
        catch its exceptions.
        """
        await self.leave()
        job = functools.partial(function, *arguments, trio.from_thread.check_cancelled)
        return await trio.to_thread.run_sync(job, limiter=self.long_jobs(account))


class Mutex:
    """A lock that costs nothing while it is free, because it has no checkpoint and no owner. Waiters get the lock in
    order of arrival.
    """

    __slots__ = ("_eager", "_waiting", "held")

    def __init__(self, eager: Eager) -> None:
        self.held = False
        self._eager = eager
        self._waiting: trio.lowlevel.ParkingLot | None = None

    async def __aenter__(self) -> None:
        if not self.held:
            self.held = True
            return
        await self._eager.leave()
        if not self.held:  # the lock was released before this task ran
            self.held = True
            return
        if self._waiting is None:
            self._waiting = trio.lowlevel.ParkingLot()
        await self._waiting.park()  # `__aexit__` hands the lock over

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waiting:
            self._waiting.unpark()
        else:
            self.held = False
