"""Coroutines that run at once, and become tasks only if they have to wait.

A request of the kernel arrives in the middle of a C function. Nearly all are answered without waiting for anything,
and a task for each would cost several times what the answer does. So a handler that might wait is a coroutine, and
its first part runs right there; when it comes to a point where it must wait, it says `await eager.leave()`
first, and from there on it is a task like any other. The alternative, each handler twice (`read_nowait`, `read`), would
be two sets of semantics to keep equal.

The rule: between the start of such a coroutine and `leave` nothing of trio is awaited. `Mutex` and `in_worker` keep
it, so handlers that wait for nothing else need not think of it.
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
"""What `start` gives for a coroutine that has to wait."""


@coroutine
def _yield_leave() -> Generator[object, Any, None]:
    yield _LEAVE


@coroutine
def _rest(started: Coroutine[Any, Any, _Result]) -> Generator[Any, Any, _Result]:
    result: _Result = yield from started.__await__()
    return result


class Eager:
    """Starts coroutines and lets them leave. All on the trio thread."""

    __slots__ = ("_is_starting", "_long_jobs")

    def __init__(self) -> None:
        self._is_starting = False
        self._long_jobs: WeakValueDictionary[int, trio.CapacityLimiter] = WeakValueDictionary()
        """Of each account that has some. In one queue for all an account's jobs held up everybody's, for minutes."""

    def start(self, started: Coroutine[Any, Any, object]) -> object:
        """Run the first part: the result if that was all, or `LEFT`: then `finish` it."""
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
        """From here on the caller is a task, and may wait."""
        if self._is_starting:
            await _yield_leave()

    async def in_worker(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run something in a worker thread that takes a millisecond or so."""
        await self.leave()
        return await trio.to_thread.run_sync(function, *arguments)

    def long_jobs(self, account: int) -> trio.CapacityLimiter:
        """How many an account may have at once: one a processor."""
        return self._long_jobs.setdefault(account, trio.CapacityLimiter(max(2, os.cpu_count() or 1)))

    async def long_job(self, account: int, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """The same for what may take minutes: one a processor for each account, and interrupted at its checkpoints.

        The function gets a checkpoint as its last argument, to be called often: it raises what must pass through.
        """
        await self.leave()
        job = functools.partial(function, *arguments, trio.from_thread.check_cancelled)
        return await trio.to_thread.run_sync(job, limiter=self.long_jobs(account))


class Mutex:
    """A lock that costs nothing while nobody waits: no checkpoint, no owner. Served in order of arrival."""

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
        if not self.held:  # let go before this task ran
            self.held = True
            return
        if self._waiting is None:
            self._waiting = trio.lowlevel.ParkingLot()
        await self._waiting.park()  # whoever lets go hands it over

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waiting:
            self._waiting.unpark()
        else:
            self.held = False
