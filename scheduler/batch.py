"""The batch scheduler: `pred()` calls of many LIPs become steps.

The life of a call: *queued* behind earlier work on the same file, *ready* once its entries are reserved,
*running* while a step computes some of them, *finished* when all are committed or all are given back. A call
is atomic: a failure in any of its chunks leaves the file as it was.

Everything here runs on the trio thread; only `decoder.step` runs elsewhere. The running step may touch
pages, so whatever frees pages of a file with work in flight goes through `exclusive`.

When to launch: at once, unless callers of the last step are about to return. A LIP's think time (from a
completion to its next call) is measured; those that usually come back within a tenth of a step are waited
for, that long at most, so that the batch does not fall apart into two half-empty ones that take turns.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import trio

from decoder.batch import Chunk, IntArray, StepBatch
from kvfs.fs import FileSystem, OpenKv
from kvfs.table import PageTable, Reservation
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, StepFailed, SymError
from scheduler.policy import Limits, plan_step
from scheduler.step_thread import StepThread

log = logging.getLogger(__name__)

LAUNCH_WAIT_SHARE = 0.1
"""Share of a step's time that a launch may wait for callers that are about to return."""
LAUNCH_WAIT_MIN_S = 0.001
"""Shorter waits are not worth a timer: the kernel's poll rounds up to a millisecond."""
THINK_WEIGHT = 0.2
"""Weight of the newest sample in a LIP's average think time."""

STEP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Steps are counted by how many calls they hold: up to the first of these, up to the second, …, or more."""

MAX_REMEMBERED_ANSWERS = 256
"""Of one LIP: as many calls as a step holds. Bounds what threads that have ended leave behind."""


class StepRunner(Protocol):
    """What the scheduler needs of a decoder."""

    def step(self, batch: StepBatch) -> None: ...


class Caller(Protocol):
    """What the scheduler knows of a LIP."""

    @property
    def pid(self) -> int: ...


@dataclass(slots=True, eq=False)
class PredCall:
    """One `pred()`: entries to append, and where the wanted rows go."""

    caller: Caller
    file: OpenKv
    tokens: IntArray
    positions: IntArray | None
    rows: tuple[memoryview, ...]
    """None, one (the last row's) or one for each token."""
    finished: Callable[[SymError | None], None]
    """Called once, on the trio thread."""
    reservation: Reservation | None = None
    num_done: int = 0
    cancelled: bool = False
    is_running: bool = False
    submitted_s: float = field(default_factory=time.perf_counter)
    compute_s: float = 0.0
    """Time of the steps that held some of it."""

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_done

    def chunk(self, num_now: int) -> Chunk:
        """The next `num_now` entries, with the page table up to their end."""
        reservation = self.reservation
        assert reservation is not None
        first, end = self.num_done, self.num_done + num_now
        if len(self.rows) == len(self.tokens):
            rows = self.rows[first:end]
        else:
            rows = self.rows if end == len(self.tokens) else ()
        num_pages = -(-(reservation.start + end) // PAGE_ENTRIES)
        return Chunk(
            tokens=reservation.tokens[first:end],
            positions=reservation.positions[first:end],
            pages=reservation.pages[:num_pages],
            start=reservation.start + first,
            rows=rows,
        )


@dataclass(slots=True)
class Statistics:
    """Counters since the daemon started; times in seconds."""

    num_steps: int = 0
    num_calls: int = 0
    num_failed_calls: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    max_calls_in_step: int = 0
    max_lips_in_step: int = 0
    step_s: float = 0.0
    last_step_s: float = 0.0
    queue_s: float = 0.0
    """Time that answered calls were not in a step, summed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one caller has used; times in seconds."""

    num_calls: int = 0
    num_failed_calls: int = 0
    num_tokens: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.num_calls + other.num_calls,
            self.num_failed_calls + other.num_failed_calls,
            self.num_tokens + other.num_tokens,
            self.queue_s + other.queue_s,
            self.compute_s + other.compute_s,
        )


@dataclass(slots=True)
class _Returning:
    """How soon a LIP comes back with its next call; one with several threads has several calls to come back with."""

    think_s: float = 0.0
    answered_s: list[float] = field(default_factory=list)
    """When the calls were answered that no new call has followed yet, oldest first. A thread that has ended leaves its
    time here, until it has been waited for in vain: so a new call counts as the return of the newest."""

    def note_answer(self) -> None:
        self.answered_s.append(time.perf_counter())
        del self.answered_s[:-MAX_REMEMBERED_ANSWERS]

    def note_call(self) -> None:
        if self.answered_s:
            think_s = time.perf_counter() - self.answered_s.pop()
            self.think_s += THINK_WEIGHT * (think_s - self.think_s)

    def note_miss(self) -> None:
        """It was waited for in vain: it is thinking longer than it used to."""
        self.think_s = time.perf_counter() - self.answered_s[-1]
        self.answered_s.clear()


@dataclass(slots=True)
class BatchScheduler:
    """Owns the queues; `run` is its loop."""

    fs: FileSystem
    decoder: StepRunner
    max_positions: int
    limits: Limits = field(default_factory=Limits)
    statistics: Statistics = field(default_factory=Statistics)
    num_steps_by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
    """Steps by the number of their calls, see `STEP_SIZES`."""
    num_calls_in_steps: int = 0
    """Summed over steps: a call that took three of them counts three times."""
    _files: dict[PageTable, deque[PredCall | Callable[[], None]]] = field(default_factory=dict)
    _ready: dict[PredCall, None] = field(default_factory=dict)
    _returning: dict[Caller, _Returning] = field(default_factory=dict)
    _usage: dict[Caller, Usage] = field(default_factory=dict)
    _arrival: trio.Event = field(default_factory=trio.Event)
    is_stepping: bool = False
    """Whether the decoder is computing a step: to be read by others."""

    # ---- what the gate calls

    def submit(self, call: PredCall) -> None:
        """Queue a call; it runs after everything submitted before it for the same file."""
        self._note_return(call.caller)
        self._enqueue(call.file.table, call)

    def exclusive(self, file: OpenKv, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call on the file is in flight: at once if it is idle."""
        self._enqueue(file.table, action)

    def drop(self, caller: Caller) -> None:
        """A LIP has gone: forget its calls; what a step is computing is given back when the step ends."""
        self._returning.pop(caller, None)
        self._usage.pop(caller, None)
        for jobs in self._files.values():
            for job in jobs:
                if isinstance(job, PredCall) and job.caller is caller:
                    job.cancelled = True
        for call in [call for call in self._ready if call.cancelled and not call.is_running]:
            self._finish(call, None)

    def usage_of(self, caller: Caller) -> Usage:
        """What the answered calls of a caller have used."""
        return self._usage.get(caller, Usage())

    @property
    def num_waiting(self) -> int:
        return sum(len(jobs) for jobs in self._files.values())

    # ---- one file's queue; its head is the job in flight

    def _enqueue(self, table: PageTable, job: PredCall | Callable[[], None]) -> None:
        jobs = self._files.setdefault(table, deque())
        jobs.append(job)
        if len(jobs) == 1:
            self._start_jobs(table)

    def _start_jobs(self, table: PageTable) -> None:
        """Start the head of the queue; actions and calls that fail at once are over when this returns."""
        jobs = self._files[table]
        while jobs:
            if self._start(jobs[0]):
                return
            jobs.popleft()
        del self._files[table]

    def _start(self, job: PredCall | Callable[[], None]) -> bool:
        """Start one job; False: it is over already. Whatever goes wrong, the file's other jobs must get their turn."""
        try:
            if not isinstance(job, PredCall):
                job()
            elif not job.cancelled:
                job.reservation = self.fs.reserve(job.file, job.tokens, self._positions(job))
                self._ready[job] = None
                self._arrival.set()
                return True
        except Exception as failure:
            if isinstance(job, PredCall) and isinstance(failure, SymError):
                self._report(job, failure)
                return False
            log.exception("a job failed before it began")
            if isinstance(job, PredCall):
                self._report(job, SymError(f"the daemon failed to take the call: {failure!r}"))
        return False

    def _positions(self, call: PredCall) -> IntArray:
        """Those that were given; else they go on after the last entry's."""
        if call.positions is not None:
            return call.positions
        first = call.file.table.next_position
        end = first + len(call.tokens)
        if end > self.max_positions:
            raise Invalid(
                f"{len(call.tokens)} tokens from position {first} on end at {end}, "
                f"beyond the model's context of {self.max_positions}: truncate the file, or give positions"
            )
        return np.arange(first, end, dtype=np.int32)

    # ---- the loop

    async def run(self) -> None:
        """Run steps for ever."""
        thread = StepThread()
        try:
            while True:
                await self._wait_for_work()
                plan = plan_step(self._ready, self.limits)
                await self._run_step(thread, plan)
                await trio.lowlevel.checkpoint()
        finally:
            thread.close()

    async def _wait_for_work(self) -> None:
        while not self._ready:
            self._arrival = trio.Event()
            await self._arrival.wait()
        wait_s = self.statistics.last_step_s * LAUNCH_WAIT_SHARE
        if wait_s < LAUNCH_WAIT_MIN_S:
            return
        with trio.move_on_after(wait_s) as scope:
            while self._expected(wait_s):
                self._arrival = trio.Event()
                await self._arrival.wait()
        if scope.cancelled_caught:
            for record in self._expected(wait_s):
                record.note_miss()

    async def _run_step(self, thread: StepThread, plan: list[tuple[PredCall, int]]) -> None:
        copies: list[tuple[int, int]] = []
        stale: list[int] = []
        for call, num_now in plan:
            call.is_running = True
            assert call.reservation is not None
            stale += call.reservation.pages_to_zero(call.num_done + num_now)
            if call.num_done == 0:
                copies += call.reservation.copies
        batch = StepBatch(tuple(call.chunk(num_now) for call, num_now in plan), tuple(copies))
        error: SymError | None = None
        began_s = time.perf_counter()
        self.is_stepping = True
        try:
            await thread.run(lambda: self._compute(batch, stale))
        except Exception as failure:
            log.exception("step %d failed: %d calls aborted", self.statistics.num_steps, len(plan))
            error = StepFailed(f"the decoder failed: {failure}; nothing was appended")
        finally:
            self.is_stepping = False
        self._count(plan, time.perf_counter() - began_s)
        self._settle(plan, error)

    def _compute(self, batch: StepBatch, stale: list[int]) -> None:
        """In the step's thread."""
        for page in stale:
            self.fs.pool.store.zero(page)
        self.decoder.step(batch)

    def _count(self, plan: list[tuple[PredCall, int]], step_s: float) -> None:
        numbers = self.statistics
        numbers.num_steps += 1
        numbers.step_s += step_s
        numbers.last_step_s = step_s
        numbers.num_tokens += sum(num_now for _, num_now in plan)
        numbers.num_prefill_tokens += sum(num_now for call, num_now in plan if len(call.tokens) > 1)
        numbers.max_calls_in_step = max(numbers.max_calls_in_step, len(plan))
        self.num_steps_by_size[bisect_left(STEP_SIZES, len(plan))] += 1
        self.num_calls_in_steps += len(plan)
        for call, _ in plan:
            call.compute_s += step_s
        numbers.max_lips_in_step = max(numbers.max_lips_in_step, len({call.caller.pid for call, _ in plan}))

    def _settle(self, plan: list[tuple[PredCall, int]], error: SymError | None) -> None:
        for call, num_now in plan:
            call.is_running = False
            call.num_done += num_now
            if error is not None:
                self._finish(call, error)
            elif call.cancelled or call.num_left == 0:
                self._finish(call, None)

    def _finish(self, call: PredCall, error: SymError | None) -> None:
        """Commit or give back a call's entries, answer it, and start the file's next job."""
        del self._ready[call]
        assert call.reservation is not None
        if error is None and not call.cancelled:
            call.reservation.commit()
            self.fs.committed(call.file)
        else:
            call.reservation.abort()
        table = call.file.table
        jobs = self._files[table]
        assert jobs[0] is call
        self._report(call, error)
        jobs.popleft()
        if jobs:
            self._start_jobs(table)
        else:
            del self._files[table]

    def _report(self, call: PredCall, error: SymError | None) -> None:
        self.statistics.num_calls += 1
        self.statistics.num_failed_calls += error is not None
        queue_s = time.perf_counter() - call.submitted_s - call.compute_s
        self.statistics.queue_s += queue_s
        if not call.cancelled:
            num_tokens = 0 if error is not None else len(call.tokens)
            used = Usage(1, int(error is not None), num_tokens, queue_s, call.compute_s)
            self._usage[call.caller] = self.usage_of(call.caller) + used
            if error is None:
                self._returning.setdefault(call.caller, _Returning()).note_answer()
            call.finished(error)

    # ---- who is about to return

    def _note_return(self, caller: Caller) -> None:
        record = self._returning.get(caller)
        if record is not None:
            record.note_call()
            self._arrival.set()

    def _expected(self, wait_s: float) -> list[_Returning]:
        return [record for record in self._returning.values() if record.answered_s and record.think_s < wait_s]
