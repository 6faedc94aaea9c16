"""Jobs of the disk in threads of their own: a disk that hangs fails those who wait, and holds up nobody else.

A job that somebody has stopped waiting for goes on: what it writes to is not used for anything else before it ends. So
each is a task of the service, and those who want its result wait for that, for a time.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import trio

from libsym.errors import SymError

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_JOBS = 16
"""At a time; a hung disk leaves so many threads behind."""


class Job(Generic[T]):
    """Something that is under way; `result` waits for it."""

    def __init__(self) -> None:
        self.is_over = trio.Event()
        self.has_ended = False
        """No thread is at work for it; what follows it may be."""
        self._result: list[T] = []
        self.error: Exception | None = None
        """Why it gave nothing."""

    def settle(self) -> T:
        """What it gave, or raises. It is over."""
        if self.error is not None:
            raise self.error
        return self._result[0]


class DiskJobs:
    """The jobs of one state directory. `run` is the task that they are children of."""

    def __init__(self, where: str, deadline_s: float) -> None:
        self._where = where
        self.deadline_s = deadline_s
        self._limiter = trio.CapacityLimiter(MAX_JOBS)
        self._nursery: trio.Nursery | None = None
        self._under_way: set[Job[Any]] = set()
        self._is_ending = False

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """For ever. Cancelled, it waits for no thread."""
        async with trio.open_nursery() as nursery:
            self._nursery, self._is_ending = nursery, False
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._is_ending = True

    def soon(self, function: Callable[[], None]) -> None:
        """Call it on the trio thread, when whoever asks is not in the middle of something any more; not if the daemon
        ends meanwhile, for then no job can be started.
        """

        async def call() -> None:
            function()

        assert self._nursery is not None, "the storage is not running"
        if not self._is_ending:
            self._nursery.start_soon(call)

    def start(self, function: Callable[[], T], then: Callable[[Job[T]], None] = lambda _job: None) -> Job[T]:
        """Begin a job; `then` is called when it has ended, on the trio thread. The daemon ends: it never begins."""
        assert self._nursery is not None, "the storage is not running"
        job: Job[T] = Job()
        if not self._is_ending:
            self._under_way.add(job)
            self._nursery.start_soon(self._run, job, function, then)
        return job

    async def wait(self, job: Job[T]) -> T:
        """What it gives, or raises. SymError, ETIMEDOUT: the disk does not answer."""
        await self._until(job.is_over)
        return job.settle()

    async def do(self, function: Callable[[], T]) -> T:
        """Begin a job and wait for it."""
        return await self.wait(self.start(function))

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    async def idle(self) -> None:
        """Return when every job has ended that was under way when this was called."""
        for job in tuple(self._under_way):
            await self._until(job.is_over)

    async def _until(self, event: trio.Event) -> None:
        with trio.move_on_after(self.deadline_s):
            await event.wait()
            return
        raise self.late()

    async def are_over(self) -> None:
        """Return when no thread is at work any more. No job may be started meanwhile."""
        turns = [object() for _ in range(MAX_JOBS)]
        for each in turns:
            await self._limiter.acquire_on_behalf_of(each)
        for each in turns:
            self._limiter.release_on_behalf_of(each)

    def late(self) -> SymError:
        """For those who have waited too long."""
        return SymError(
            f"the disk below {self._where} has not answered for {self.deadline_s:g} s: what was asked for may or may "
            "not be on it",
            errno.ETIMEDOUT,
        )

    async def _run(self, job: Job[T], function: Callable[[], T], then: Callable[[Job[T]], None]) -> None:
        try:
            job._result.append(  # noqa: SLF001 - the two are one mechanism
                await trio.to_thread.run_sync(function, limiter=self._limiter, abandon_on_cancel=True)
            )
        except Exception as error:  # noqa: BLE001 - told to who waits
            job.error = error
        job.has_ended = True
        try:
            then(job)
        except Exception:
            log.exception("what follows a job of the disk failed")
        self._under_way.discard(job)
        job.is_over.set()
