"""Disk jobs, each in a thread of its own. If the disk hangs, only tasks that wait for a job fail. Other tasks go on.

A job continues after its caller has stopped waiting. The memory or slot that a job writes to is not reused before the
job ends. So each job is a task of the service, and a caller waits for the job's end only for a limited time.
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
"""The most jobs that run at a time. If the disk hangs, up to this many threads are stuck."""


class Job(Generic[T]):
    """A job under way. `DiskJobs.wait` waits for it."""

    def __init__(self) -> None:
        self.is_over = trio.Event()
        self.has_ended = False
        """Whether the job's thread has ended. `then` may still be running."""
        self._result: list[T] = []
        self.error: Exception | None = None
        """The exception of the job, if it failed."""

    def settle(self) -> T:
        """Return the result of a job that is over, or raise its error."""
        if self.error is not None:
            raise self.error
        return self._result[0]


class DiskJobs:
    """The jobs of one state directory. They are children of the task that runs `run`."""

    def __init__(self, where: str, deadline_s: float) -> None:
        self._where = where
        self.deadline_s = deadline_s
        self._limiter = trio.CapacityLimiter(MAX_JOBS)
        self._nursery: trio.Nursery | None = None
        self._under_way: set[Job[Any]] = set()
        self._is_ending = False

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run as the parent task of all jobs until cancelled. Then return without waiting for a thread."""
        async with trio.open_nursery() as nursery:
            self._nursery, self._is_ending = nursery, False
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._is_ending = True

    def soon(self, function: Callable[[], None]) -> None:
        """Call a function on the trio thread after the caller has yielded. While the daemon ends, the function is not
        called, because no further job can start.
        """

        async def call() -> None:
            function()

        assert self._nursery is not None, "the storage is not running"
        if not self._is_ending:
            self._nursery.start_soon(call)

    def start(self, function: Callable[[], T], then: Callable[[Job[T]], None] = lambda _job: None) -> Job[T]:
        """Begin a job. When the job ends, `then` is called on the trio thread. While the daemon ends, no job begins."""
        assert self._nursery is not None, "the storage is not running"
        job: Job[T] = Job()
        if not self._is_ending:
            self._under_way.add(job)
            self._nursery.start_soon(self._run, job, function, then)
        return job

    async def wait(self, job: Job[T]) -> T:
        """Wait for a job. Return its result or raise its error. Raise ETIMEDOUT if the disk does not answer in time."""
        await self._until(job.is_over)
        return job.settle()

    async def do(self, function: Callable[[], T]) -> T:
        """Begin a job and wait for it."""
        return await self.wait(self.start(function))

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    async def idle(self) -> None:
        """Wait for all jobs that are under way now."""
        for job in tuple(self._under_way):
            await self._until(job.is_over)

    async def _until(self, event: trio.Event) -> None:
        with trio.move_on_after(self.deadline_s):
            await event.wait()
            return
        raise self.late()

    async def are_over(self) -> None:
        """Wait until no thread runs a job. The caller must start no job meanwhile."""
        places = [object() for _ in range(MAX_JOBS)]
        for each in places:
            await self._limiter.acquire_on_behalf_of(each)
        for each in places:
            self._limiter.release_on_behalf_of(each)

    def late(self) -> SymError:
        """Return the error for a wait that took too long."""
        return SymError(
            f"the disk below {self._where} has not answered for {self.deadline_s:g} s: what was asked for may or may "
            "not be on the disk",
            errno.ETIMEDOUT,
        )

    async def _run(self, job: Job[T], function: Callable[[], T], then: Callable[[Job[T]], None]) -> None:
        try:
            job._result.append(  # noqa: SLF001 - both classes are one mechanism
                await trio.to_thread.run_sync(function, limiter=self._limiter, abandon_on_cancel=True)
            )
        except Exception as error:  # noqa: BLE001 - raised in the waiting task
            job.error = error
        job.has_ended = True
        try:
            then(job)
        except Exception:
            log.exception("the callback of a disk job failed")
        self._under_way.discard(job)
        job.is_over.set()
