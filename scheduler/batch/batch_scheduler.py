"""The batch scheduler: calls of many LIPs that append to files become steps.

Everything here runs on the trio thread; only steps run elsewhere. `in_flight.py` has the life of a call, `policy.py`
what a step holds, `arrivals.py` when it is launched.

When all that there is to do is one token for each of some files, the steps follow each other in C (`run.py`) until
somebody has to decide something.

The decoder may come later than the first calls: its weights take a while to load. They get their room and wait, and can
be cancelled, as behind a long step.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable

import trio

from decoder.batch import IntArray, NativeStep
from kvfs.fs import FileSystem, OpenKv
from kvfs.names.content import KvFile
from libsym.errors import StepFailed, SymError
from scheduler.batch.accounting import Accounting, Statistics, Usage
from scheduler.batch.arrivals import Arrivals
from scheduler.batch.call import Caller, FileCall
from scheduler.batch.in_flight import CallsInFlight
from scheduler.batch.policy import Limits, Path, plan_step, prefilling
from scheduler.batch.queues import Action
from scheduler.batch.room import Room
from scheduler.batch.run import MAX_MEMBERS, Run
from scheduler.batch.run_end import settle_run
from scheduler.batch.runs import Runs
from scheduler.batch.scratch import Scratch
from scheduler.batch.step import Step, StepRunner
from scheduler.batch.step_thread import StepThread

log = logging.getLogger(__name__)

MAX_REMEMBERED_PREFILLS = 1024
"""Accounts and kinds of calls. With more of them those are forgotten that nobody is behind any more."""


class BatchScheduler:
    """What others ask of calls in flight, and the loop of steps."""

    def __init__(
        self,
        fs: FileSystem,
        decoder: StepRunner | None,
        max_positions: int,
        vocab_size: int,
        limits: Limits | None = None,
        *,
        native: NativeStep | None = None,
        expect: Callable[[IntArray], None] | None = None,
        max_entries: int | None = None,
    ) -> None:
        """`decoder` and `native`: see `provide`, which brings them if they are not there yet.

        `expect` is told at once of the pages that a call will need, which may be far from the decoder. `max_entries`:
        see `Room`.
        """
        self.fs = fs
        self._decoder: StepRunner | None = None
        self._native: NativeStep | None = None
        self._provided = trio.Event()
        self.limits = limits or Limits()
        self.is_stepping = False
        """Whether the decoder is computing a step: to be read by others."""
        self._accounting = Accounting()
        self._arrivals = Arrivals()
        self._runs = Runs(fs, self._accounting)
        self.sync = self._runs.sync
        """To be called before anybody looks at files."""
        self._room = Room(fs, max_positions, max_entries)
        self._calls = CallsInFlight(self._room, self._runs, self._accounting, self._arrivals, expect)
        self._scratch = Scratch(vocab_size)
        self._prefilled_s: dict[Path, float] = {}
        """When prefills last had tokens, by account: since there was last nothing to compute."""
        if decoder is not None:
            self.provide(decoder, native)

    # ---- what others call

    def provide(self, decoder: StepRunner, native: NativeStep | None = None) -> None:
        """Here is what computes steps: those that wait for it begin.

        `native`: its step for loops in C; without it every step is scheduled here.
        """
        assert self._decoder is None
        self._decoder, self._native = decoder, native
        self._room.has_runs = native is not None
        self._provided.set()

    @property
    def has_decoder(self) -> bool:
        return self._decoder is not None

    def submit(self, call: FileCall) -> None:
        """Queue a call; it runs after everything submitted before it for the same file."""
        call.submitted_s = time.perf_counter()
        self._arrivals.note_call(call.caller)
        self._calls.deadlines.add(call)
        run = self._runs.run
        if run is None or not run.take(call):
            self._calls.add(call)

    def have_rows(self, call: FileCall) -> None:
        """A call that was submitted without its result slots has them."""
        self._calls.have_rows(call)

    def refuse(self, call: FileCall, error: SymError) -> None:
        """A call that was submitted without its result slots gets none."""
        self._calls.refuse(call, error)

    def cancel(self, call: FileCall) -> None:
        """End a call early, with ECANCELED and nothing appended; a generation ends with what it has."""
        self._calls.cancel(call)

    def exclusive(self, file: OpenKv | KvFile, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call on the file is in flight: at once if it is idle."""
        self._calls.add(Action(file, action))

    def when_unused(self, file: OpenKv, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call by this very handle is in flight; what others do has handles of its own."""
        self._calls.when_unused(file, action)

    def drop(self, caller: Caller) -> None:
        """A LIP has gone: forget its calls."""
        self._arrivals.forget(caller)
        self._accounting.forget(caller)
        self._calls.drop(caller)

    def usage_of(self, caller: Caller) -> Usage:
        """What the answered calls of a caller have used."""
        return self._accounting.usage_of(caller)

    @property
    def statistics(self) -> Statistics:
        return self._accounting.statistics

    @property
    def num_waiting(self) -> int:
        """Jobs that are queued or in flight."""
        return len(self._calls)

    # ---- the loop

    async def run(self) -> None:
        """Run steps for ever."""
        thread = StepThread()
        self._runs.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._runs.watch)
                nursery.start_soon(self._calls.deadlines.run)
                await self._step_for_ever(thread)
        finally:
            thread.close()
            os.close(self._runs.wake_fd)

    async def _step_for_ever(self, thread: StepThread) -> None:
        ready = self._calls.ready
        await self._provided.wait()
        while True:
            while not ready:
                self._prefilled_s.clear()  # nobody waits, so nobody has to be let go first
                await self._arrivals.wait()
            await self._arrivals.wait_for_returning(self._accounting.statistics.last_step_s)
            self._calls.deadlines.end_missed()
            if not ready:
                continue
            await self._step(thread, plan_step(ready, self.limits, time.perf_counter(), self._prefilled_s))
            await trio.lowlevel.checkpoint()

    async def _step(self, thread: StepThread, plan: list[tuple[FileCall, int]]) -> None:
        assert self._decoder is not None
        if self._native is not None and self._may_run(plan):
            await self._run_steps(thread, self._native, [call for call, _ in plan])
        else:
            await self._run_step(thread, self._decoder, plan)

    async def _run_step(self, thread: StepThread, decoder: StepRunner, plan: list[tuple[FileCall, int]]) -> None:
        step = Step(plan, self._scratch)
        served = prefilling(plan)
        began_s = time.perf_counter()
        error = await self._in_thread(thread, len(plan), lambda: step.compute(decoder, self.fs.pool.store))
        ended_s = time.perf_counter()
        self._note_prefills(served, ended_s)  # behind what has become ready in the meantime
        self._accounting.count_step(plan, ended_s - began_s)
        self._calls.settle(plan, error)

    def _note_prefills(self, served: Iterable[Path], now_s: float) -> None:
        """These had tokens. What was before all that waits now makes no difference any more."""
        self._prefilled_s |= dict.fromkeys(served, now_s)
        if len(self._prefilled_s) > MAX_REMEMBERED_PREFILLS:
            oldest_s = min((call.waiting_since_s for call in self._calls.ready), default=now_s)
            self._prefilled_s = {path: at_s for path, at_s in self._prefilled_s.items() if at_s > oldest_s}

    def _may_run(self, plan: list[tuple[FileCall, int]]) -> bool:
        """Whether steps for all calls may follow each other in C."""
        return len(plan) == len(self._calls.ready) <= MAX_MEMBERS and all(
            call.num_left == 1 and call.hot is not None and call.mask is None for call, _ in plan
        )

    async def _run_steps(self, thread: StepThread, native: NativeStep, calls: list[FileCall]) -> None:
        for call in calls:
            call.is_running = True
        run = Run(native, calls, self._scratch.rows(len(calls)), self._runs.wake_fd)
        self._runs.begin(run)
        error = await self._in_thread(thread, len(calls), lambda: run.execute(self.fs.pool.store))
        self._runs.end()
        settle_run(run, self._calls, self._arrivals, error)

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
