"""The batch scheduler: `pred()` calls of many LIPs become steps.

The life of a call: *queued* behind earlier work on the same file, *ready* once its entries are reserved,
*running* while a step computes some of them, *finished* when all are committed or all are given back. A call
is atomic: a failure in any of its chunks leaves the file as it was.

Everything here runs on the trio thread; only steps run elsewhere. The running step may touch
pages, so whatever frees pages of a file with work in flight goes through `exclusive`.

When all that there is to do is one token for each of some files, the steps follow each other in C (`run.py`) until
somebody has to decide something; `sync` brings the files up to date meanwhile, before anybody looks at them.

When to launch: at once, unless callers of the last step are about to return. A LIP's think time (from a
completion to its next call) is measured; those that usually come back within a tenth of a step are waited
for, that long at most, so that the batch does not fall apart into two half-empty ones that take turns.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeAlias

import numpy as np
import trio

from decoder.batch import IntArray, NativeStep, StepBatch
from kvfs.fs import FileSystem, OpenKv
from kvfs.pages.table import PageTable, Reservation
from libsym.abi import PAGE_ENTRIES, Finish
from libsym.errors import Invalid, NoSpace, OverQuota, StepFailed, SymError
from scheduler._loop import lib as loop
from scheduler.batch.call import Caller, EntryMask, FileCall, PredCall, Rows
from scheduler.batch.generation import GenerateCall
from scheduler.batch.policy import Limits, Path, plan_step, prefilling
from scheduler.batch.run import COMPUTING, MAX_MEMBERS, Member, Run
from scheduler.batch.step_thread import StepThread
from scheduler.replies import kept

__all__ = ["BatchScheduler", "Caller", "EntryMask", "FileCall", "PredCall", "Statistics", "Usage"]

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

MAX_REMEMBERED_PREFILLS = 1024
"""Accounts and kinds of calls. With more of them those are forgotten that nobody is behind any more."""

AHEAD_ENTRIES = 64
"""Entries reserved beyond the next for a file that a run may grow: a run ends when they are used up."""
AHEAD_POOL_SHARE = 16
"""With less than this part of the pool free, only what is left of a file's last page is reserved ahead."""


class StepRunner(Protocol):
    """What the scheduler needs of a decoder."""

    def step(self, batch: StepBatch) -> None: ...


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
    num_rejected: int = 0
    """Of the tokens, those of drafts that turned out wrong: they are in no file."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.num_calls + other.num_calls,
            self.num_failed_calls + other.num_failed_calls,
            self.num_tokens + other.num_tokens,
            self.queue_s + other.queue_s,
            self.compute_s + other.compute_s,
            self.num_rejected + other.num_rejected,
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


class Scratch:
    """Rows of logits that nobody waits for: drawn from or reduced in the step's thread, then used again."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._blocks: list[memoryview[float]] = []

    def rows(self, count: int) -> list[memoryview[float]]:
        """The first `count` rows; made when they are first needed, and kept."""
        while len(self._blocks) < count:
            row: Any = np.empty(self._vocab_size, np.float32)
            self._blocks.append(memoryview(row))
        return self._blocks[:count]


class Action:
    """What is done to a file between two calls."""

    __slots__ = ("do", "file")

    def __init__(self, file: OpenKv, do: Callable[[], None]) -> None:
        self.file = file
        self.do = do


Job: TypeAlias = FileCall | Action
Jobs: TypeAlias = "OrderedDict[Job, None]"
"""In order; any of them leaves at once, however long the queue is."""


@dataclass(slots=True)
class BatchScheduler:
    """Owns the queues; `run` is its loop."""

    fs: FileSystem
    decoder: StepRunner
    max_positions: int
    vocab_size: int
    limits: Limits = field(default_factory=Limits)
    native: NativeStep | None = None
    """The decoder's step for loops in C; without it every step is scheduled here."""
    expect: Callable[[IntArray], None] | None = None
    """To be told at once of the pages that a call will need: they may be far from the decoder."""
    max_entries: int | None = None
    """Of a file that a call appends to: what the decoder can have before it at a time."""
    statistics: Statistics = field(default_factory=Statistics)
    num_steps_by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
    """Steps by the number of their calls, see `STEP_SIZES`."""
    num_taken_calls: int = 0
    """Calls of pred() that runs took without the gate."""
    num_calls_in_steps: int = 0
    """Summed over steps: a call that took three of them counts three times."""
    _files: dict[PageTable, Jobs] = field(default_factory=dict)
    _num_jobs: Counter[OpenKv] = field(default_factory=Counter)
    """Of each handle, those that are queued or in flight."""
    _when_unused: dict[OpenKv, list[Callable[[], None]]] = field(default_factory=dict)
    """What waits for the last of them."""
    _ready: dict[FileCall, None] = field(default_factory=dict)
    _returning: dict[Caller, _Returning] = field(default_factory=dict)
    _usage: dict[Caller, Usage] = field(default_factory=dict)
    _arrival: trio.Event = field(default_factory=trio.Event)
    is_stepping: bool = False
    """Whether the decoder is computing a step: to be read by others."""
    _run: Run | None = None
    _synced: int = 0
    """Progress of the run that the files show already."""
    _prefilled_s: dict[Path, float] = field(default_factory=dict)
    """When prefills last had tokens, by account: since there was last nothing to compute."""
    _short: list[PageTable] = field(default_factory=list)
    """Files whose next call found no room, and there may be some when the run gives back what it has reserved."""
    _scratch: Scratch = field(init=False)
    _wake_fd: int = -1

    def __post_init__(self) -> None:
        self._scratch = Scratch(self.vocab_size)

    # ---- what the gate calls

    def submit(self, call: FileCall) -> None:
        """Queue a call; it runs after everything submitted before it for the same file."""
        call.submitted_s = time.perf_counter()
        self._note_return(call.caller)
        if self._run is None or not self._run.take(call):
            self._enqueue(call.file.table, call)

    def cancel(self, call: FileCall) -> None:
        """End a call early, with ECANCELED and nothing appended; a generation ends with what it has."""
        if call.cancelled:
            return
        jobs = self._files.get(call.file.table)
        if jobs is None or call not in jobs or not self._cancel(jobs, call):
            call.cancelled = True
            self._end_cancelled()

    def _cancel(self, jobs: Jobs, call: FileCall) -> bool:
        """End a call of this queue if nothing was begun for it. False: it is the head, and ends with its step."""
        call.cancelled = True
        if _head(jobs) is call:
            return False
        del jobs[call]
        self._report(call, None)
        self._job_is_over(call)
        return True

    def exclusive(self, file: OpenKv, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call on the file is in flight: at once if it is idle."""
        self._enqueue(file.table, Action(file, action))

    def when_unused(self, file: OpenKv, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call by this very handle is in flight; what others do has handles of its own."""
        if file in self._num_jobs:
            self._when_unused.setdefault(file, []).append(action)
            if self._run is not None and self._run.holds(file.table):
                self._run.stop()
        else:
            action()

    def drop(self, caller: Caller) -> None:
        """A LIP has gone: forget its calls; what a step is computing is given back when the step ends."""
        self._returning.pop(caller, None)
        self._usage.pop(caller, None)
        for jobs in list(self._files.values()):
            for job in list(jobs):
                if isinstance(job, FileCall) and job.caller is caller:
                    job.is_dropped = True
                    self._cancel(jobs, job)
        self._end_cancelled()

    def usage_of(self, caller: Caller) -> Usage:
        """What the answered calls of a caller have used."""
        return self._usage.get(caller, Usage())

    @property
    def num_waiting(self) -> int:
        return sum(len(jobs) for jobs in self._files.values())

    def sync(self) -> None:
        """Let files show what a run has computed so far: to be called before anybody looks at them."""
        run = self._run
        if run is not None and run.progress != self._synced:
            self._sync(run)

    def _sync(self, run: Run) -> None:
        self._synced = run.progress
        for member in run.members:
            self._commit_member(member)
            self._count_member(member)
        self._count_run(run)

    def _end_cancelled(self) -> None:
        if self._run is not None:
            self._run.stop()
        for call in [call for call in self._ready if call.cancelled and not call.is_running]:
            self._finish(call, None)

    # ---- one file's queue; its head is the job in flight

    def _enqueue(self, table: PageTable, job: Job) -> None:
        if self._run is not None and self._run.holds(table):
            self._run.stop()
        jobs = self._files.setdefault(table, OrderedDict())
        jobs[job] = None
        self._num_jobs[job.file] += 1
        if len(jobs) == 1:
            self._start_jobs(table)

    def _start_jobs(self, table: PageTable) -> None:
        """Start the head of the queue; actions and calls that fail at once are over when this returns."""
        jobs, over = self._files[table], list[Job]()
        while jobs and not self._start(_head(jobs)):
            over.append(jobs.popitem(last=False)[0])
        if not jobs:
            del self._files[table]
        for job in over:
            self._job_is_over(job)

    def _job_is_over(self, job: Job) -> None:
        """It has left its queue: whoever waits for the last job of its handle may go on."""
        self._num_jobs[job.file] -= 1
        if not self._num_jobs[job.file]:
            del self._num_jobs[job.file]
            for action in self._when_unused.pop(job.file, ()):
                _do(action)

    def _start(self, job: Job) -> bool:
        """Start one job; False: it is over already. Whatever goes wrong, the file's other jobs must get their turn."""
        if isinstance(job, Action):
            _do(job.do)
            return False
        if job.cancelled:
            self._report(job, None)
            return False
        return self._start_turn(job)

    def _start_turn(self, call: FileCall) -> bool:
        """Reserve what a call's turn appends; then it is ready. False: it has failed, and is over.

        While there is a run, one that finds no room is started again when that is over.
        """
        try:
            reservation = self._reserve(call)
            try:
                call.begin(reservation, self.max_positions)
            except BaseException:
                reservation.abort()
                raise
        except Exception as failure:
            if isinstance(failure, (NoSpace, OverQuota)) and self._run is not None:
                self._short.append(call.file.table)
                self._run.stop()
                return True
            if isinstance(failure, SymError):
                self._report(call, kept(failure))
            else:
                log.exception("a call failed before it began")
                self._report(call, SymError(f"the daemon failed to take the call: {failure!r}"))
            return False
        self._ready[call] = None
        self._arrival.set()
        if self.expect is not None:
            self.expect(reservation.pages)
        if self._run is not None:
            self._run.stop()
        return True

    def _reserve(self, call: FileCall) -> Reservation:
        num_entries = call.file.table.length + len(call.tokens)
        if self.max_entries is not None and num_entries > self.max_entries:
            raise NoSpace(
                f"a file of {num_entries} entries does not fit the GPU, which has room for {self.max_entries}: start "
                "the daemon with more --gpu-memory"
            )
        positions = self._positions(call)
        ahead = self._num_ahead(call, int(positions[-1]) + 1)
        if ahead:
            last = int(positions[-1])
            more = np.arange(last + 1, last + 1 + ahead, dtype=np.int32)
            tokens = np.concatenate((call.tokens, np.zeros(ahead, np.int32)))
            try:
                return self.fs.reserve(call.file, tokens, np.concatenate((positions, more)))
            except (NoSpace, OverQuota):
                pass  # then as many as are asked for, or nothing
        return self.fs.reserve(call.file, call.tokens, positions)

    def _num_ahead(self, call: FileCall, next_position: int) -> int:
        """Entries to reserve beyond a turn's: for a run, if there may be one."""
        if self.native is None or call.hot is None:
            return 0
        length = call.file.table.length + len(call.tokens)
        ahead = -length % PAGE_ENTRIES
        if self.fs.pool.num_free * AHEAD_POOL_SHARE > self.fs.pool.num_pages:
            ahead += AHEAD_ENTRIES
        return max(0, min(ahead, self.max_positions - next_position))

    def _positions(self, call: FileCall) -> IntArray:
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
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_run)
                await self._step_for_ever(thread)
        finally:
            thread.close()
            os.close(self._wake_fd)

    async def _watch_run(self) -> None:
        """A run looks at the rings of its programs; what it finds there for others is for the gate."""
        while True:
            await trio.lowlevel.wait_readable(self._wake_fd)
            if self._run is not None:
                self._wake_programs(self._run)

    def _wake_programs(self, run: Run) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
            run.wake_programs()

    async def _step_for_ever(self, thread: StepThread) -> None:
        while True:
            await self._wait_for_work()
            await self._step(thread, plan_step(self._ready, self.limits, time.perf_counter(), self._prefilled_s))
            await trio.lowlevel.checkpoint()

    async def _step(self, thread: StepThread, plan: list[tuple[FileCall, int]]) -> None:
        if self._may_run(plan):
            await self._run_steps(thread, [call for call, _ in plan])
        else:
            await self._run_step(thread, plan)

    async def _wait_for_work(self) -> None:
        while not self._ready:
            self._prefilled_s.clear()  # nobody waits, so nobody has to be let go first
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

    # ---- one step

    async def _run_step(self, thread: StepThread, plan: list[tuple[FileCall, int]]) -> None:
        copies: list[tuple[int, int]] = []
        stale: list[int] = []
        for call, num_now in plan:
            call.is_running = True
            assert call.reservation is not None
            stale += call.reservation.pages_to_zero(call.num_done + num_now)
            if call.num_done == 0:
                copies += call.reservation.copies
        scratch = self._shares_of_scratch(plan)
        chunks = [call.chunk(num_now, rows) for (call, num_now), rows in zip(plan, scratch, strict=True)]
        batch = StepBatch(tuple(chunks), tuple(copies))
        digests = [(call, rows) for (call, _), rows in zip(plan, scratch, strict=True) if rows]
        served = prefilling(plan)
        began_s = time.perf_counter()
        error = await self._in_thread(thread, len(plan), lambda: self._compute(batch, stale, digests))
        ended_s = time.perf_counter()
        self._note_prefills(served, ended_s)  # behind what has become ready in the meantime
        self._count(plan, ended_s - began_s)
        self._settle(plan, error)

    def _note_prefills(self, served: Iterable[Path], now_s: float) -> None:
        """These had tokens. What was before all that waits now makes no difference any more."""
        self._prefilled_s |= dict.fromkeys(served, now_s)
        if len(self._prefilled_s) > MAX_REMEMBERED_PREFILLS:
            oldest_s = min((call.waiting_since_s for call in self._ready), default=now_s)
            self._prefilled_s = {path: at_s for path, at_s in self._prefilled_s.items() if at_s > oldest_s}

    def _shares_of_scratch(self, plan: list[tuple[FileCall, int]]) -> list[Rows]:
        counts = [call.num_scratch(num_now) for call, num_now in plan]
        rows = iter(self._scratch.rows(sum(counts)))
        return [list(islice(rows, count)) for count in counts]

    async def _in_thread(self, thread: StepThread, num_calls: int, function: Callable[[], None]) -> SymError | None:
        """Compute in the step's thread; what went wrong."""
        self.is_stepping = True
        try:
            await thread.run(function)
        except Exception as failure:
            log.exception("step %d failed: %d calls aborted", self.statistics.num_steps, num_calls)
            return StepFailed(f"the decoder failed: {failure}; nothing was appended")
        finally:
            self.is_stepping = False
        return None

    def _compute(self, batch: StepBatch, stale: list[int], digests: list[tuple[FileCall, Rows]]) -> None:
        """In the step's thread."""
        self._zero(stale)
        self.decoder.step(batch)
        for call, rows in digests:
            call.digest(len(call.tokens) - 1 if call.num_digested == 1 else call.num_done, rows)

    def _zero(self, stale: list[int]) -> None:
        for page in stale:
            self.fs.pool.store.zero(page)

    def _count(self, plan: list[tuple[FileCall, int]], step_s: float) -> None:
        numbers = self.statistics
        numbers.num_steps += 1
        numbers.step_s += step_s
        numbers.last_step_s = step_s
        numbers.num_tokens += sum(num_now for _, num_now in plan)
        numbers.num_prefill_tokens += sum(num_now for call, num_now in plan if len(call.tokens) > 1)
        self._count_size(len(plan), 1)
        for call, _ in plan:
            call.compute_s += step_s
        numbers.max_lips_in_step = max(numbers.max_lips_in_step, len({call.caller.pid for call, _ in plan}))

    def _count_size(self, num_calls: int, num_steps: int) -> None:
        self.statistics.max_calls_in_step = max(self.statistics.max_calls_in_step, num_calls)
        self.num_steps_by_size[bisect_left(STEP_SIZES, num_calls)] += num_steps
        self.num_calls_in_steps += num_calls * num_steps

    def _settle(self, plan: list[tuple[FileCall, int]], error: SymError | None) -> None:
        for call, num_now in plan:
            call.is_running = False
            call.num_done += num_now
            if error is not None or call.is_dropped or (call.cancelled and (call.num_left or call.cancellation())):
                self._finish(call, error)
            elif call.num_left == 0:
                self._end_turn(call)

    def _end_turn(self, call: FileCall) -> None:
        """Every entry of a turn is computed: commit those that count; the call goes on with its next turn, or ends."""
        reservation = call.reservation
        assert reservation is not None
        num_entries = call.end_turn()
        call.num_appended += num_entries
        call.num_rejected += len(call.tokens) - num_entries
        num_reserved = len(reservation.tokens)
        reservation.commit_first(reservation.tokens[:num_entries])
        if num_entries < num_reserved:
            reservation.abort()
        self.fs.committed(call.file)
        call.reservation = None
        del self._ready[call]
        if not call.next_turn() or call.cancelled:
            self._leave(call, None)
        elif not self._start_turn(call):
            self._next_job(call)

    def _finish(self, call: FileCall, error: SymError | None) -> None:
        """Give a call's entries back, answer it, and start the file's next job."""
        del self._ready[call]
        assert call.reservation is not None
        call.reservation.abort()
        self._leave(call, error)

    def _leave(self, call: FileCall, error: SymError | None) -> None:
        self._report(call, error)
        self._next_job(call)

    def _next_job(self, call: FileCall) -> None:
        """The head of a file's queue is over: it is the next one's turn."""
        table = call.file.table
        jobs = self._files[table]
        head, _ = jobs.popitem(last=False)
        assert head is call
        if jobs:
            self._start_jobs(table)
        else:
            del self._files[table]
        self._job_is_over(call)

    def _report(self, call: FileCall, error: SymError | None) -> None:
        if call.cancelled and error is None:
            error = call.cancellation()
        self.statistics.num_calls += 1
        self.statistics.num_failed_calls += error is not None
        queue_s = time.perf_counter() - call.submitted_s - call.compute_s
        self.statistics.queue_s += queue_s
        call.let_go()
        if call.is_dropped:
            return
        num_computed = call.num_appended + call.num_rejected
        used = Usage(1, int(error is not None), num_computed, queue_s, call.compute_s, call.num_rejected)
        self._usage[call.caller] = self.usage_of(call.caller) + used
        if error is None:
            self._returning.setdefault(call.caller, _Returning()).note_answer()
        call.end(error)

    # ---- steps that follow each other in C

    def _may_run(self, plan: list[tuple[FileCall, int]]) -> bool:
        return (
            self.native is not None
            and len(plan) == len(self._ready) <= MAX_MEMBERS
            and all(call.num_left == 1 and call.hot is not None and call.mask is None for call, _ in plan)
        )

    async def _run_steps(self, thread: StepThread, calls: list[FileCall]) -> None:
        assert self.native is not None
        copies: list[tuple[int, int]] = []
        stale: list[int] = []
        for call in calls:
            call.is_running = True
            assert call.reservation is not None
            stale += call.reservation.pages_to_zero(len(call.reservation.tokens))
            copies += call.reservation.copies
        run = Run(self.native, calls, copies, self._scratch.rows(len(calls)), self._wake_fd)
        self._run, self._synced = run, 0

        def compute() -> None:
            self._zero(stale)
            run.execute()

        error = await self._in_thread(thread, len(calls), compute)
        self._sync(run)
        self._run = None
        self._wake_programs(run)
        for num_calls in range(1, len(calls) + 1):
            if num_steps := run.steps_of(num_calls):
                self._count_size(num_calls, num_steps)
        for member in run.members:
            member.let_go()
            self._give_back(member)
        short, self._short = self._short, []
        for table in short:
            self._start_jobs(table)
        for member in run.members:
            self._settle_member(member, error)

    def _commit_member(self, member: Member) -> None:
        num_done, call = member.num_done, member.call
        if num_done > member.num_committed:
            assert call.reservation is not None
            call.reservation.commit_first(member.log[member.num_committed : num_done])
            self.statistics.num_tokens += num_done - member.num_committed
            self.fs.committed(call.file)
            member.num_committed = num_done

    def _count_member(self, member: Member) -> None:
        """Note what the calls of a program used; a generation counts as one call, at its end."""
        compute_s = member.compute_ns * 1e-9
        num_entries = member.num_committed - member.num_counted_entries
        member.num_counted_entries = member.num_committed
        if member.hot is None:
            member.call.compute_s += compute_s - member.compute_s
            member.call.num_appended += num_entries
        elif not member.call.is_dropped:
            num_calls = member.num_calls - member.num_counted
            used = Usage(num_calls, 0, num_entries, 0.0, compute_s - member.compute_s)
            self._usage[member.call.caller] = self.usage_of(member.call.caller) + used
            self.statistics.num_calls += num_calls
            member.num_counted += num_calls
        member.compute_s = compute_s

    def _count_run(self, run: Run) -> None:
        counts, numbers = run.count(), self.statistics
        numbers.num_steps += counts.num_steps
        numbers.step_s += counts.step_s
        numbers.last_step_s = counts.last_step_s
        self.num_taken_calls += counts.num_taken
        callers = {member.call.caller.pid for member in run.members}
        numbers.max_lips_in_step = max(numbers.max_lips_in_step, len(callers))

    def _give_back(self, member: Member) -> None:
        """A run is over: what a member has reserved and left."""
        call, reservation = member.call, member.call.reservation
        assert reservation is not None
        call.is_running = False
        del self._ready[call]
        if member.num_done < len(member.log):
            reservation.abort()
        call.reservation = None

    def _settle_member(self, member: Member, error: SymError | None) -> None:
        """What it had reserved is given back; its call goes on or ends."""
        call = member.call
        if isinstance(call, GenerateCall):
            self._settle_generation(call, member, error)
        else:
            self._settle_program(call, member, error)

    def _settle_generation(self, call: GenerateCall, member: Member, error: SymError | None) -> None:
        if member.end == loop.SYM_END_UNSENT:
            call.emit([member.token])
        if member.end == loop.SYM_END_STOP_TOKEN:
            call.stopped(Finish.STOP_TOKEN, member.token)
        elif member.num_to_emit == 0:
            call.stopped(Finish.LENGTH)
        elif member.end == loop.SYM_END_DRAW:
            call.failed(member.draw_failure())
        elif error is None and not call.cancelled:
            call.went_on(member.token, member.draw_index, member.num_to_emit)
            if not self._start_turn(call):
                self._next_job(call)
            return
        self._leave(call, error)

    def _settle_program(self, call: FileCall, member: Member, error: SymError | None) -> None:
        """Its calls are answered but for the last, perhaps; `call` itself was the first of them."""
        hot = member.hot
        assert hot is not None
        if member.num_done == 0:
            self._leave(call, error)
            return
        again: FileCall | None = None
        if not call.is_dropped:
            if member.end == loop.SYM_END_UNSENT:
                hot.answer(member.call_id, member.slot, call.file.table.length)
            if member.state == COMPUTING:
                again = hot.again(member.call_id, member.slot, member.token)
            else:
                self._returning.setdefault(call.caller, _Returning()).note_answer()
        if again is None:
            self._next_job(call)
        else:
            jobs = self._files[call.file.table]
            del jobs[call]
            jobs[again] = None
            jobs.move_to_end(again, last=False)
            if error is not None:
                self._leave(again, error)
            elif not self._start_turn(again):
                self._next_job(again)

    # ---- who is about to return

    def _note_return(self, caller: Caller) -> None:
        record = self._returning.get(caller)
        if record is not None:
            record.note_call()
            self._arrival.set()

    def _expected(self, wait_s: float) -> list[_Returning]:
        return [record for record in self._returning.values() if record.answered_s and record.think_s < wait_s]


def _head(jobs: Jobs) -> Job:
    return next(iter(jobs))


def _do(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        log.exception("what was to be done to a file failed")
