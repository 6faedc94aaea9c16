"""Calls in flight: from their place in a file's queue to their answer.

The life of a call: *queued* behind earlier work on the same file and until it has its
result slots, *ready* once its entries are reserved, *running*
while a step computes some of them, *finished* when all are committed or all are given back. A call is atomic: a failure
in any of its chunks leaves the file as it was.

The running step may touch pages, so whatever frees pages of a file with work in flight waits for its place there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from kvfs.pages.table import PageTable
from libsym.errors import BadHandle, NoSpace, OverQuota, SymError
from scheduler.batch.accounting import Accounting
from scheduler.batch.arrivals import Arrivals
from scheduler.batch.call import Caller, FileCall
from scheduler.batch.deadlines import Deadlines
from scheduler.batch.queues import Action, FileQueues, Job, do
from scheduler.batch.room import Room
from scheduler.batch.runs import Runs
from scheduler.replies import kept

log = logging.getLogger(__name__)


class CallsInFlight:
    """All of it on the trio thread."""

    def __init__(
        self,
        room: Room,
        runs: Runs,
        accounting: Accounting,
        arrivals: Arrivals,
        expect: Callable[[IntArray], None] | None,
    ) -> None:
        self.ready: dict[FileCall, None] = {}
        """In order of arrival; also those that a step is computing."""
        self._room = room
        self._runs = runs
        self._accounting = accounting
        self._arrivals = arrivals
        self._expect = expect
        self._queues = FileQueues(self._start)
        self.deadlines = Deadlines(self.expire)
        self._short: list[PageTable] = []
        """Files whose next call found no room, and there may be some when the run gives back what it has reserved."""

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, job: Job) -> None:
        """It is started after everything that was added before it for the same file."""
        if self._runs.run is not None:
            self._runs.stop_if_holds(job.file.table)
        self._queues.add(job)

    def when_unused(self, file: OpenKv, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call by this very handle is in flight. Those that wait for rows end at once."""
        for call in self._queues.without_rows(file):
            self.refuse(call, BadHandle("the file was closed while pred() waited for result slots"))
        if not self._queues.when_unused(file, action):
            self._runs.stop_if_holds(file.table)

    def have_rows(self, call: FileCall) -> None:
        """A call that waited for its result slots has them: it begins, if it is its turn."""
        call.is_waiting_for_rows = False
        if self._queues.is_head(call):
            self._queues.start(call.file.table)

    def refuse(self, call: FileCall, error: SymError) -> None:
        """A call that waits for result slots gets none: it ends in its place, and the next one goes on."""
        assert call.is_waiting_for_rows
        self._take_out(call, error)

    def cancel(self, call: FileCall) -> None:
        """End a call early."""
        if not call.cancelled and not self._cancel(call):
            self._end_cancelled()

    def expire(self, call: FileCall) -> None:
        """Its deadline has passed: as if it were cancelled, but that the step under way may still end it well."""
        if not call.cancelled:
            call.is_late = True
            self.cancel(call)

    def drop(self, caller: Caller) -> None:
        """Nobody waits for its calls any more; what a step is computing is given back when the step ends."""
        for call in self._queues.calls_of(caller):
            call.is_dropped = True
            self._cancel(call)
        self._end_cancelled()

    def _cancel(self, call: FileCall) -> bool:
        """End a call if nothing was begun for it. False: it ends with its step."""
        call.cancelled = True
        return self._take_out(call, None)

    def _take_out(self, call: FileCall, error: SymError | None) -> bool:
        """End a call if nothing was begun for it."""
        if self._queues.take_out(call):
            self._report(call, error)
            self._queues.left(call)
        elif call.is_waiting_for_rows:
            self.leave(call, error)
        else:
            return False
        return True

    def _end_cancelled(self) -> None:
        self._runs.stop()
        for call in [call for call in self.ready if call.cancelled and not call.is_running]:
            self._finish(call, None)

    # Stretches

    def _start(self, job: Job) -> bool:
        """It is the head of its queue. False: it is over already. Whatever goes wrong, the next ones get their turn."""
        if isinstance(job, Action):
            do(job.do)
        elif job.cancelled:
            self._report(job, None)
        else:
            return job.is_waiting_for_rows or self._start_stretch(job)
        return False

    def _start_stretch(self, call: FileCall) -> bool:
        """Reserve what a call's stretch appends; then it is ready. False: it has failed, and is over.

        While there is a run, one that finds no room is started again when that is over.
        """
        try:
            frames = self._reserve(call)
        except Exception as failure:
            if isinstance(failure, (NoSpace, OverQuota)) and self._runs.run is not None:
                self._short.append(call.file.table)
                self._runs.stop()
                return True
            if isinstance(failure, SymError):
                self._report(call, kept(failure))
            else:
                log.exception("a call failed before it began")
                self._report(call, SymError(f"the daemon failed to take the call: {failure!r}"))
            return False
        self.ready[call] = None
        self._arrivals.note()
        if self._expect is not None:
            self._expect(frames)
        if self._runs.run is not None:
            self._runs.stop()
        return True

    def _reserve(self, call: FileCall) -> IntArray:
        reservation = self._room.reserve(call)
        try:
            call.begin(reservation, self._room.max_positions)
        except BaseException:
            reservation.abort()
            raise
        return reservation.frames(len(reservation.pages))

    def settle(self, plan: Sequence[tuple[FileCall, int]], error: SymError | None) -> None:
        """A step is over: each call has so many entries more, or none does."""
        for call, num_now in plan:
            call.is_running = False
            call.num_done += num_now
            if error is not None or call.is_dropped or (call.cancelled and (call.num_left or call.cancellation())):
                self._finish(call, error)
            elif call.num_left == 0:
                self._end_stretch(call)

    def _end_stretch(self, call: FileCall) -> None:
        """All of a stretch is computed: commit those that count. The call goes on with its next one, or ends."""
        reservation = call.reservation
        assert reservation is not None
        num_entries = call.end_stretch()
        call.num_appended += num_entries
        call.num_rejected += len(call.tokens) - num_entries
        num_reserved = len(reservation.tokens)
        reservation.commit_first(reservation.tokens[:num_entries])
        if num_entries < num_reserved:
            reservation.abort()
        self._room.fs.committed(call.file)
        call.reservation = None
        del self.ready[call]
        if not call.next_stretch() or call.cancelled:
            self.leave(call, None)
        else:
            self.go_on(call)

    def _finish(self, call: FileCall, error: SymError | None) -> None:
        """Give a call's entries back, answer it, and start the file's next job."""
        del self.ready[call]
        assert call.reservation is not None
        call.reservation.abort()
        self.leave(call, error)

    # Ends

    def go_on(self, call: FileCall) -> None:
        """With its next stretch; or it has failed, and it is the next job's."""
        if not self._start_stretch(call):
            self._queues.next(call)

    def leave(self, call: FileCall, error: SymError | None) -> None:
        """Answer a call, and start the file's next job."""
        self._report(call, error)
        self._queues.next(call)

    def leave_answered(self, call: FileCall) -> None:
        """A run has answered it."""
        self._queues.next(call)

    def replace(self, call: FileCall, other: FileCall) -> None:
        """What a run has made of a call is another one of the same program, for the same handle."""
        self._queues.replace(call, other)

    def start_short(self) -> None:
        """The run has given back what it had reserved and not used."""
        short, self._short = self._short, []
        for table in short:
            self._queues.start(table)

    def _report(self, call: FileCall, error: SymError | None) -> None:
        if call.cancelled and error is None:
            error = call.cancellation()
        self._accounting.count_call(call, error)
        self.deadlines.forget(call)
        call.let_go()
        if call.is_dropped:
            return
        if error is None:
            self._arrivals.note_answer(call.caller)
        call.end(error)
