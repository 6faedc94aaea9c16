"""The batch scheduler combines calls of many LIPs into steps. All these calls append to files.

C runs one step after the other (`loop.c`), in a thread of its own. This module works on the trio thread. Each call gets
a place in its file's queue, room for its entries, and a place in the run. Afterwards the scheduler settles the call's
results. `in_flight.py` has the life of a call, `policy.py` the choice of calls for a step.

Calls may arrive before the decoder is ready, because its weights take a while to load. Such calls get their room and
wait for the decoder. They can be cancelled meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import trio

from decoder.batch import IntArray, NativeStep, StepBatch
from kvfs.fs import FileSystem, OpenKv
from kvfs.names.content import KvFile
from libsym.channel.server import ServerChannel
from libsym.errors import SymError
from scheduler.batch.accounting import Accounting, Statistics
from scheduler.batch.asleep import asleep
from scheduler.batch.call import Caller, FileCall
from scheduler.batch.callback_step import CallbackStep
from scheduler.batch.cost_model import RECORD, CostModel
from scheduler.batch.in_flight import CallsInFlight
from scheduler.batch.making_room import Preemption
from scheduler.batch.policy import StepLimits
from scheduler.batch.queues import Action
from scheduler.batch.recomputing import Recomputing
from scheduler.batch.room import Room
from scheduler.batch.standing import StandingRun
from scheduler.batch.states import CallState
from scheduler.batch.traced import note_arrival, traced_steps
from scheduler.programs.program import Program
from scheduler.programs.used import Used
from scheduler.trace.recorder import Recorder, Recording

log = logging.getLogger(__name__)

HANGS_AFTER_S = 30.0
"""Age at which a step is logged as hanging. On a slow machine, a chunk of a prefill takes some seconds."""


LEARNS_EACH_S = 0.25
MAX_LEARNT = 64
"""Maximum number of latest steps from which the cost model learns in one pass.

Learning takes time, and earlier steps are similar.
"""
SAVES_EACH_S = 60.0


class StepRunner(Protocol):
    """Decoder that computes a step in Python."""

    def step(self, batch: StepBatch) -> None: ...


class BatchScheduler:
    """The scheduler of calls: it queues calls, runs steps, and answers questions about the calls in flight."""

    def __init__(
        self,
        fs: FileSystem,
        decoder: StepRunner | None,
        max_positions: int,
        vocab_size: int,
        limits: StepLimits | None = None,
        *,
        native: NativeStep | None = None,
        expect: Callable[[IntArray], None] | None = None,
        max_entries: int | None = None,
        cost: CostModel | None = None,
    ) -> None:
        """Make a scheduler. If `decoder` and `native` are None, `provide` sets them later.

        `expect` gets the frames of a call before the call joins the run. A decoder with its own memory can then fetch
        the frames. `max_entries`: see `Room`. `cost`: a cost model that has learnt already.
        """
        self.cost = cost or CostModel("cpu", "", None)
        """The cost model, which learns from the times of steps."""
        self.fs = fs
        self._vocab_size = vocab_size
        self._native: NativeStep | None = None
        self._callback: CallbackStep | None = None
        self._provided = trio.Event()
        self._accounting = Accounting()
        self._run = StandingRun(fs, self._accounting, vocab_size, limits or StepLimits())
        self.sync, self.sync_file = self._run.sync, self._run.sync_file
        """Functions to call before a reader looks at files, or at one file."""
        self._run.set_cost(self.cost.coefficients)
        self.recorder = Recorder()
        room = Room(fs, max_positions, max_entries)
        self._calls = CallsInFlight(room, self._run, self._accounting, expect, self.recorder)
        preemption = Preemption(self._run, fs.pool, fs.volume.pager)
        self.preempt, self.idle_out, self.compute_s = preemption.preempt, preemption.idle_out, Recomputing(self.cost)
        """The pager's functions: see `Engine`."""
        self.adopt, self.connect = self._calls.adopt, self._run.connect
        """Functions of the calls and of the run: see `CallsInFlight` and `StandingRun`."""
        stays = self._run.stays
        self.gate, self.pay = stays.gate, stays.pay
        self.gate.max_positions = max_positions
        if max_entries is not None:
            self.gate.max_entries = max_entries
        self._may_begin = expect is None
        self.gate.is_closed = not self._may_begin
        self.weigh = self._run.shares.weigh
        """Function to call when the weight of an account has changed."""
        self._traced = 0
        """Serial number of the next step for the recorder, which has the earlier steps or does not want them."""
        if decoder is not None:
            self.provide(decoder, native)

    # ---- for the rest of the daemon

    def provide(self, decoder: StepRunner, native: NativeStep | None = None) -> None:
        """Set the decoder. Calls that wait for it then begin.

        `native`: the decoder's step in C; without it the run calls `decoder.step`.
        """
        assert self._native is None
        if native is None:
            self._callback = CallbackStep(decoder.step, self._vocab_size)
            native = self._callback.native
        self._native = native
        self._provided.set()

    @property
    def has_decoder(self) -> bool:
        return self._native is not None

    @property
    def is_stepping(self) -> bool:
        """Whether the decoder is computing a step."""
        return self._run.is_stepping

    @property
    def step_age_s(self) -> float:
        """Seconds since the step under way began; 0 without one."""
        since_ns, _ = self._run.stepping_since()
        return (time.monotonic_ns() - since_ns) * 1e-9 if since_ns else 0.0

    def set_step(self, step_s: float) -> None:
        """Set the time limit of steps that hold both decodes and prefills: see `StepLimits.step_s`."""
        self._run.steps.may_take(step_s)

    def submit(self, call: FileCall) -> None:
        """Queue a call; it runs after everything submitted before it for the same file."""
        call.submitted_s = time.monotonic()
        self._calls.submit(call)

    def submit_all(self, calls: Sequence[FileCall]) -> None:
        """Queue the calls of one request. The run waits a moment until all calls are queued, so that one step holds
        these calls.
        """
        num_expected = len(calls)
        self._run.expect(num_expected)
        try:
            for call in calls:
                self.submit(call)
                self._run.expect(-1)
                num_expected -= 1
        finally:
            self._run.expect(-num_expected)

    def have_rows(self, call: FileCall) -> None:
        """Note that a call now has its result slots. The call was submitted without them."""
        self._calls.have_rows(call)

    def refuse(self, call: FileCall, error: SymError) -> None:
        """End a call that was submitted without its result slots and gets no slots."""
        self._calls.refuse(call, error)

    def cancel(self, call: FileCall) -> None:
        """End a call early, with ECANCELED and no appended entries. A generation keeps its tokens instead."""
        self._calls.cancel(call)

    def cancel_taken(self, channel: ServerChannel, call_id: int) -> bool:
        """Cancel a call that the run took out of its program's ring. False: the run computes no call with this id."""
        return self._calls.cancel_taken(channel, call_id)

    def exclusive(self, file: OpenKv | KvFile, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call on the file is in flight: immediately if the file is idle."""
        self._calls.add(Action(file, action))

    def when_unused(self, file: OpenKv, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call by this very handle is in flight. Calls by other handles do not matter."""
        self._calls.when_unused(file, action)

    def drop(self, caller: Caller) -> None:
        """Forget the calls of a connection that has gone."""
        self._calls.drop(caller)

    def stop(self, program: Program, error: SymError) -> None:
        """End the calls of a program that is over a limit, with `error`."""
        self._calls.stop(program, error)

    def forget(self, program: Program) -> None:
        """Forget a program that has ended, after its last connection has gone."""
        self._calls.forget(program)

    def states(self) -> dict[Caller, Counter[tuple[CallState, str]]]:
        """Count the calls of each caller by state and kind."""
        found: dict[Caller, Counter[tuple[CallState, str]]] = {}
        for call in self._calls.calls():
            state = self._calls.state_of(call)
            if state is not None:
                found.setdefault(call.caller, Counter())[state, call.kind.word] += 1
        return found

    def begin_trace(self, version: int) -> Recording:
        """Begin a recording of the calls in flight and of all later calls and steps.

        `version`: the version of traces that the reader knows.
        """

        def tell() -> None:
            for call in self._calls.calls():
                note_arrival(self.recorder, call)

        if not self.recorder.is_on:
            self.gate.is_closed = True  # Python records arrivals, so C may begin no calls
            self._run.steps.trace(True)
            self._traced = self._run.steps.counts().num_steps
        return self.recorder.begin(tell, version)

    def trace_steps(self) -> None:
        """Give the recorder the steps that it does not have yet."""
        if self._traced < (num_steps := self._run.steps.counts().num_steps):
            self.recorder.steps(*traced_steps(*self._run.steps.traced_since(self._traced)))
            self._traced = num_steps

    def end_trace(self, recording: Recording) -> None:
        self.trace_steps()
        self.recorder.end(recording)
        if not self.recorder.is_on:
            self._run.steps.trace(False)
            self.gate.is_closed = not self._may_begin

    def domains(self) -> dict[int, Used]:
        """Return the usage of calls on the files of each domain, by the number of the domain's account."""
        self._run.stays.count()
        return self._accounting.domains()

    @property
    def statistics(self) -> Statistics:
        self._run.stays.count()
        self._accounting.count_steps(self._run.steps.counts(), in_c=self._callback is None)
        return self._accounting.statistics

    @property
    def num_waiting(self) -> int:
        """Number of jobs that are queued or in flight."""
        return len(self._calls)

    @property
    def num_rows_waiting(self) -> int:
        """Number of tokens that calls in flight were given, roughly: steps have computed some of them already."""
        return sum(call.num_given for call in self._calls.calls())

    # ---- the run

    async def run(self) -> None:
        """Run steps until this task is cancelled. The caller then calls `close`."""
        try:
            await self._provided.wait()
            assert self._native is not None
            self._run.start(self._native)
            with asleep(self.gate, self.fs.pool.take_news):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._settle_for_ever)
                    nursery.start_soon(self._calls.deadlines.run)
                    nursery.start_soon(self._watch_steps)
                    nursery.start_soon(self._learn)
        finally:
            self._run.close()
            self.sync()  # commits the entries of the last step: no task settles its members any more

    async def close(self) -> None:
        """Save the cost model for the next daemon. Called after `run`."""
        await self._save_cost()

    async def _settle_for_ever(self) -> None:
        while True:
            ended, low = await self._run.news()
            for member in low:
                if member.index >= 0:
                    self._calls.extend(member)
            for member in ended:
                if member.index >= 0:
                    self._calls.settle(member)
            await trio.lowlevel.checkpoint()

    async def _learn(self) -> None:
        """Learn the cost of steps from computed steps, until this task is cancelled."""
        number, learnt_s = 0, time.monotonic()
        while True:
            await trio.sleep(LEARNS_EACH_S)
            if (num_steps := self._run.steps.counts().num_steps) == number:
                continue
            steps, number = self._run.steps.since(number)[-MAX_LEARNT:], num_steps
            records = np.empty(len(steps), RECORD)
            for name in ("num_rows", "num_wanted", "num_entries", "num_seen", "num_pairs"):
                records[name] = steps[name]
            records["ns"] = steps["ended_ns"] - steps["began_ns"]
            await trio.to_thread.run_sync(self.cost.observe, records)
            self._run.set_cost(self.cost.coefficients)
            self.compute_s.learn()
            if time.monotonic() - learnt_s > SAVES_EACH_S:
                learnt_s = time.monotonic()
                await self._save_cost()

    async def _save_cost(self) -> None:
        """Save the cost model. A full disk causes a warning. A disk that hangs does not delay the daemon's end."""
        try:
            await trio.to_thread.run_sync(self.cost.save, abandon_on_cancel=True)
        except OSError as error:
            log.warning("the cost model of steps can't be saved: %s", error)

    async def _watch_steps(self) -> None:
        """Log each hanging step once, with the programs whose calls the step holds."""
        said_of = 0
        while True:
            await trio.sleep(HANGS_AFTER_S / 4)
            since_ns, members = self._run.stepping_since()
            if since_ns and since_ns != said_of and time.monotonic_ns() - since_ns > HANGS_AFTER_S * 1e9:
                said_of = since_ns
                programs = sorted({member.call.caller.pid for member in members})
                log.error(
                    "a step of %d calls, of programs %s, has been computed for %.0f s and is not over: the decoder "
                    "hangs, or this machine has no time for it",
                    len(members),
                    ", ".join(map(str, programs)),
                    (time.monotonic_ns() - since_ns) * 1e-9,
                    extra={"program": programs},
                )
