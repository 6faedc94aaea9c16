"""The batch scheduler: calls of many LIPs that append to files become steps.

Steps follow each other in C (`loop.c`), in a thread of their own. Here, on the trio thread, calls get their place in
their file's queue, room, and a place in the run; and what has come of them is settled. `in_flight.py` has the life of a
call, `policy.py` what a step holds.

The decoder may come later than the first calls: its weights take a while to load. They get their room and wait, and can
be cancelled, as behind a long step.
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
from scheduler.batch.policy import Limits
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
"""A step that takes so long is named in the log: a prefill's chunk takes some seconds on a slow machine."""


LEARNS_EACH_S = 0.25
MAX_LEARNT = 64
"""Of these steps the latest are learnt from: the others are much alike, and a millisecond is enough for it."""
SAVES_EACH_S = 60.0


class StepRunner(Protocol):
    """A decoder, as far as the scheduler needs one."""

    def step(self, batch: StepBatch) -> None: ...


class BatchScheduler:
    """The scheduler of calls: queues them, tells of those in flight, and runs the steps."""

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
        cost: CostModel | None = None,
    ) -> None:
        """`decoder` and `native`: see `provide`, which brings them if they are not there yet.

        `expect` is told at once of the pages that a call will need, which may be far from the decoder. `max_entries`:
        see `Room`. `cost`: what is known of steps already.
        """
        self.cost = cost or CostModel("cpu", "", None)
        """The cost model, which learns from steps what steps take."""
        self.fs = fs
        self._vocab_size = vocab_size
        self._native: NativeStep | None = None
        self._callback: CallbackStep | None = None
        self._provided = trio.Event()
        self._accounting = Accounting()
        self._run = StandingRun(fs, self._accounting, vocab_size, limits or Limits())
        self.sync, self.sync_file = self._run.sync, self._run.sync_file
        """To be called before anybody looks at files, or at the file of one table."""
        self._run.set_cost(self.cost.coefficients)
        self.recorder = Recorder()
        room = Room(fs, max_positions, max_entries)
        self._calls = CallsInFlight(room, self._run, self._accounting, expect, self.recorder)
        preemption = Preemption(self._run, fs.pool, fs.volume.pager)
        self.preempt, self.idle_out, self.compute_s = preemption.preempt, preemption.idle_out, Recomputing(self.cost)
        """For the pager: see `Engine`."""
        self.adopt, self.connect = self._calls.adopt, self._run.connect
        """See `Engine` and `StandingRun`."""
        stays = self._run.stays
        self.gate, self.pay = stays.gate, stays.pay
        self.gate.max_positions = max_positions
        if max_entries is not None:
            self.gate.max_entries = max_entries
        self._may_begin = expect is None
        self.gate.is_closed = not self._may_begin
        self.weigh = self._run.shares.weigh
        """To be called when the weight of an account has changed."""
        self._traced = 0
        """Steps that the recorder knows, or need not."""
        if decoder is not None:
            self.provide(decoder, native)

    # ---- what others call

    def provide(self, decoder: StepRunner, native: NativeStep | None = None) -> None:
        """Here is what computes steps: those that wait for it begin.

        `native`: its step for the run in C; without it that calls the decoder's `step` back.
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
        """Set the seconds that a step may take for the sake of prefills, from now on."""
        self._run.steps.may_take(step_s)

    def submit(self, call: FileCall) -> None:
        """Queue a call; it runs after everything submitted before it for the same file."""
        call.submitted_s = time.monotonic()
        self._calls.submit(call)

    def submit_all(self, calls: Sequence[FileCall]) -> None:
        """Queue the calls of one request. The run waits a moment for those to come, so that one step has them all."""
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
        """A call that was submitted without its result slots has them."""
        self._calls.have_rows(call)

    def refuse(self, call: FileCall, error: SymError) -> None:
        """A call that was submitted without its result slots gets none."""
        self._calls.refuse(call, error)

    def cancel(self, call: FileCall) -> None:
        """End a call early, with ECANCELED and nothing appended; a generation ends with what it has."""
        self._calls.cancel(call)

    def cancel_taken(self, channel: ServerChannel, call_id: int) -> bool:
        """The same for a call that the run took out of its program's ring. False: it computes none with this id."""
        return self._calls.cancel_taken(channel, call_id)

    def exclusive(self, file: OpenKv | KvFile, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call on the file is in flight: at once if it is idle."""
        self._calls.add(Action(file, action))

    def when_unused(self, file: OpenKv, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call by this very handle is in flight; what others do has handles of its own."""
        self._calls.when_unused(file, action)

    def drop(self, caller: Caller) -> None:
        """A connection has gone: forget its calls."""
        self._calls.drop(caller)

    def stop(self, program: Program, error: SymError) -> None:
        """A program is over a limit: its calls end with that error."""
        self._calls.stop(program, error)

    def forget(self, program: Program) -> None:
        """A program has ended, and its last connection has gone."""
        self._calls.forget(program)

    def states(self) -> dict[Caller, Counter[tuple[CallState, str]]]:
        """Count the calls of each caller, by what they wait for and by their kind."""
        found: dict[Caller, Counter[tuple[CallState, str]]] = {}
        for call in self._calls.calls():
            state = self._calls.state_of(call)
            if state is not None:
                found.setdefault(call.caller, Counter())[state, call.kind.word] += 1
        return found

    def begin_trace(self, version: int) -> Recording:
        """Begin a recording of the calls that are in flight, and of all that happens from now on.

        `version`: of the traces that the reader knows.
        """

        def tell() -> None:
            for call in self._calls.calls():
                note_arrival(self.recorder, call)

        if not self.recorder.is_on:
            self.gate.is_closed = True  # arrivals are noted by Python
            self._run.steps.trace(True)
            self._traced = self._run.steps.counts().num_steps
        return self.recorder.begin(tell, version)

    def trace_steps(self) -> None:
        """The recorder is told of the steps since it was told last."""
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
        """Return what calls on the files of each domain have used, by the number of its account."""
        self._run.stays.count()
        return self._accounting.domains()

    @property
    def statistics(self) -> Statistics:
        self._run.stays.count()
        self._accounting.count_steps(self._run.steps.counts(), in_c=self._callback is None)
        return self._accounting.statistics

    @property
    def num_waiting(self) -> int:
        """Jobs that are queued or in flight."""
        return len(self._calls)

    # ---- the run

    async def run(self) -> None:
        """Run steps for ever; `close` follows."""
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
            self.sync()  # programs have the answers of the last step, also those that have gone: nobody settles them

    async def close(self) -> None:
        """After `run`: what was learnt of steps is what the next daemon begins with."""
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
        """Learn what steps take, from those that were computed."""
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
        """A disk that is full ends nothing, one that hangs holds up nobody who ends."""
        try:
            await trio.to_thread.run_sync(self.cost.save, abandon_on_cancel=True)
        except OSError as error:
            log.warning("what is known of the cost of steps can't be kept: %s", error)

    async def _watch_steps(self) -> None:
        """Say once of a step that it hangs, and of which calls it is."""
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
