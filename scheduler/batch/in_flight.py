"""Calls in flight: from their place in a file's queue to their answer.

A call is first *queued*: behind earlier work on the same file, and until it has its result slots. Once its entries are
reserved, the call is *in the run* as a member. The call is *over* when all its entries are committed or all are given
back. `ends.py` settles members that have left the run. A call is atomic: a failure in any of its chunks leaves the file
as it was.

A step may use pages of a file in the run, so an operation that frees pages waits in the file's queue. A program
that thinks blocks no other work on its file: its member leaves the run as soon as another job arrives for the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from kvfs.pages.table import PageTable
from libsym.channel.server import ServerChannel
from libsym.errors import BadHandle, NoSpace, OverQuota, SymError
from scheduler._loop import lib
from scheduler.batch.accounting import Accounting
from scheduler.batch.call import Caller, FileCall
from scheduler.batch.deadlines import Deadlines
from scheduler.batch.ends import Ends
from scheduler.batch.making_room import Reclaiming, priority_of
from scheduler.batch.member import Member
from scheduler.batch.queues import Action, FileQueues, Job, do
from scheduler.batch.room import Room
from scheduler.batch.standing import LEAVE_ANSWERED, LEAVE_NOW, StandingRun
from scheduler.batch.states import IN_THE_RUN, CallState, Early
from scheduler.batch.traced import note_answer, note_arrival
from scheduler.programs.limits import OverLimit
from scheduler.programs.program import Program
from scheduler.trace.recorder import Recorder
from scheduler.wire.replies import kept

log = logging.getLogger(__name__)


class CallsInFlight:
    """Calls from submission to answer, on the trio thread."""

    def __init__(
        self,
        room: Room,
        run: StandingRun,
        accounting: Accounting,
        expect: Callable[[IntArray], None] | None,
        recorder: Recorder,
    ) -> None:
        self._room = room
        self._run = run
        self._accounting = accounting
        self._expect = expect
        self._recorder = recorder
        self._queues = FileQueues(self._start)
        self.ends = Ends(self, room.fs, run)
        self.deadlines = Deadlines(self.expire)
        self._pager = room.fs.volume.pager
        self._reclaiming = Reclaiming(run, self._start_again)

    def __len__(self) -> int:
        return len(self._queues) + len(self._run.stays)

    def calls(self) -> list[FileCall]:
        """Return all calls, queued or begun."""
        self._run.take_over()
        return self._queues.calls()

    def adopt(self, core: Any) -> None:
        """Take over a call that the core began. `core`: the `core_table` of its branch, which has objects now."""
        self._queues.adopt(self._run.adopt(lib.sym_stay_of(core)).call)

    # ---- for the scheduler

    def submit(self, call: FileCall) -> None:
        """Run a call after everything submitted before it for the same file."""
        self.deadlines.add(call)
        member = self._run.member_of(call.file.table)
        if member is not None and self._run.take(member, call):
            call.move(CallState.OVER)  # the run answers it; traces count it with the calls that the run took
            return
        if self._recorder.is_on:
            note_arrival(self._recorder, call)
        self.add(call)

    def add(self, job: Job) -> None:
        """Start a job after everything that was added before it for the same file."""
        member = self._run.member_of(job.file.table)
        self._queues.add(job)
        if member is not None:
            self._retire(member)

    def when_unused(self, file: OpenKv, action: Callable[[], None]) -> None:
        """Run `action` when no earlier call by this very handle is in flight. Calls that wait for slots end now."""
        for call in self._queues.without_rows(file):
            if call.state is CallState.WAITS_FOR_SLOTS:  # an earlier call's end may have ended it or given it slots
                self.refuse(call, BadHandle("the file was closed while pred() waited for result slots"))
        if not self._queues.when_unused(file, action):
            member = self._run.member_of(file.table)
            if member is not None and member.call.file is file:
                self._retire(member)

    def have_rows(self, call: FileCall) -> None:
        """Begin a call that has got its result slots, if the call is the head of its queue."""
        call.move(CallState.QUEUED)
        if self._queues.is_head(call):
            self._queues.start(call.file.table)

    def refuse(self, call: FileCall, error: SymError) -> None:
        """End a call that waits for result slots and gets no slots. The next call of the queue starts."""
        assert call.state is CallState.WAITS_FOR_SLOTS
        self._take_out(call, error)

    def cancel(self, call: FileCall) -> None:
        """End a call early."""
        if call.early is None:
            self._end_early(call, Early.CANCELLED)

    def cancel_taken(self, channel: ServerChannel, call_id: int) -> bool:
        """End the call, or the calls of a batch, that the run took with this id.

        False: the run computes no such call.
        """
        is_found = False
        for member in self._run.find_taken(channel, call_id):
            member.cancelled_id = call_id % 2**64
            self._leave(member, LEAVE_NOW)
            is_found = True
        return is_found

    def expire(self, call: FileCall) -> None:
        """End a call whose deadline has passed. If the step under way completes the call, it still succeeds."""
        if call.early is None:
            self._end_early(call, Early.LATE)

    def drop(self, caller: Caller) -> None:
        """Forget a connection's calls. Entries in the step under way are given back when the step ends."""
        self._run.gone(caller)
        calls = self._queues.calls_of(caller)
        for call in calls:  # marks all of them first, so that the end of one neither begins nor answers another
            call.end_early(Early.GONE)
        for call in calls:
            self._end_early(call, Early.GONE)

    def stop(self, program: Program, error: SymError) -> None:
        """End all calls of a program."""
        for call in self._queues.calls():
            if call.caller.program is program and call.early is None:
                call.refusal = error
                self._end_early(call, Early.REFUSED)

    def forget(self, program: Program) -> None:
        """Forget a program, after the program and its connections have gone."""
        self._run.shares.forget(program)

    def state_of(self, call: FileCall) -> CallState | None:
        """Return the state of a call. None: its program has the answer and thinks."""
        if call.state in IN_THE_RUN:
            return self._run.state_of(self._member_of(call))
        return call.state

    def _member_of(self, call: FileCall) -> Member:
        member = self._run.member_of(call.file.table)
        assert member is not None
        assert member.call is call
        return member

    def _end_early(self, call: FileCall, why: Early) -> None:
        """End a call early: now, with its step, or at the end of its present state."""
        call.end_early(why)
        match call.state:
            case CallState.WAITS_FOR_SLOTS | CallState.QUEUED:
                self._take_out(call, None)
            case CallState.WAITS_FOR_PAGES:
                assert call.ticket is not None
                self._pager.cancel(call.ticket)
                call.ticket = None  # breaks a cycle: the ticket refers to the call
                self.finish(call, None)
            case CallState.RUNNING | CallState.EXTENDING:
                self._leave(self._member_of(call), LEAVE_NOW)

    def _take_out(self, call: FileCall, error: SymError | None) -> None:
        """End a call that waits in its file's queue, or that waits for result slots at the queue's head."""
        if self._queues.take_out(call):
            self._report(call, error)
            self._queues.left(call)
        elif call.state is CallState.WAITS_FOR_SLOTS:
            self.leave(call, error)

    def _retire(self, member: Member) -> None:
        """Have a program's loop leave the run, so that no other job of its file waits while the program thinks."""
        if member.loop is not None:
            self._leave(member, LEAVE_ANSWERED)

    def _leave(self, member: Member, how: int) -> None:
        if self._run.leave(member, how):
            self.settle(member)

    # ---- stretches

    def _start(self, job: Job) -> bool:
        """Start the head of a queue. False: the head is over already. The next jobs go on after any failure."""
        if isinstance(job, Action):
            do(job.do)
        elif job.early is not None:
            self._report(job, None)
        else:
            return job.state is CallState.WAITS_FOR_SLOTS or self._start_stretch(job)
        return False

    def _start_stretch(self, call: FileCall, *, is_last_try: bool = False) -> bool:
        """Reserve room for a call's stretch and bring its pages into memory. False: the call has failed and is over.

        If there is no room, the call tries again when other calls have given back unused reserved pages.
        """
        try:
            try:
                self._reserve(call)
            except (NoSpace, OverQuota) as failure:
                may_wait = not is_last_try and not isinstance(failure, OverLimit)
                of_user = isinstance(failure, OverQuota)
                if not may_wait or not self._reclaiming.begin(call.file.table, of_user=of_user):
                    raise
                call.move(CallState.WAITS_FOR_ROOM)
                return True
            self._acquire(call)
        except Exception as failure:  # noqa: BLE001 - it is reported
            if call.reservation is not None:
                call.reservation.abort()
            self._report(call, _said(failure))
            return False
        return True

    def _reserve(self, call: FileCall) -> None:
        reservation = self._room.reserve(call)
        try:
            call.begin(reservation, self._room.max_positions)
        except BaseException:
            call.reservation = None
            reservation.abort()
            raise
        call.promise(len(call.tokens))

    def _acquire(self, call: FileCall) -> None:
        """Bring all pages of a call's file into memory, and then put the call into the run."""
        assert call.reservation is not None
        call.ticket = self._pager.acquire(call.reservation, priority_of(call), partial(self._has_pages, call))
        if call.ticket is None:
            self._enter(call)
        else:
            call.move(CallState.WAITS_FOR_PAGES)

    def _has_pages(self, call: FileCall, error: SymError | None) -> None:
        """Go on with a call after its pages were brought into memory. If that failed, end the call with `error`."""
        call.ticket = None
        if error is not None:
            self.finish(call, kept(error))
            return
        try:
            self._enter(call)
        except Exception as failure:  # noqa: BLE001 - it is reported
            self.finish(call, _said(failure))

    def _enter(self, call: FileCall) -> None:
        """Put a call into the run, after the pages with bytes of other accounts are zeroed."""
        reservation = call.reservation
        assert reservation is not None
        if self._expect is not None:
            self._expect(reservation.frames())
        stale = reservation.pages_to_zero(reservation.num_entries)
        if not stale:
            self._join(call)
            return
        call.move(CallState.ZEROING)
        self._run.aside.ask(partial(self._zero, stale), partial(self._is_zeroed, call))

    def _join(self, call: FileCall) -> None:
        """Let a call join the run. A loop over pred() leaves after its first call if other jobs wait for the file."""
        member = self._run.join(call)
        call.move(CallState.RUNNING)
        thinks = member.loop is not None and self._queues.is_waited_for(call)
        if thinks:
            self._run.leave_soon(member)

    def _zero(self, pages: list[int]) -> None:
        for page in pages:
            self._room.fs.pool.store.zero(page)

    def _is_zeroed(self, call: FileCall, error: Exception | None) -> None:
        if error is not None or call.early is not None:
            self.finish(call, None if error is None else _said(error))
            return
        try:
            self._join(call)
        except Exception as failure:  # noqa: BLE001 - it is reported
            self.finish(call, _said(failure))

    # ---- more room for members

    def extend(self, member: Member) -> None:
        """Give a member more room before it has used up its own."""
        reservation = member.call.reservation
        if reservation is None or not reservation.is_open or not self._room.extend(member.call, reservation):
            return  # the member leaves when its room is used up, and its call then gets room like any other
        stale = reservation.pages_to_zero(reservation.num_entries)
        if stale:
            member.call.move(CallState.EXTENDING)
            self._run.aside.ask(partial(self._zero, stale), partial(self._has_more, member))
        else:
            member.extend(self._run.loop)

    def _has_more(self, member: Member, error: Exception | None) -> None:
        member.call.move(CallState.RUNNING)
        if error is None:
            member.extend(self._run.loop)
        if self._run.has_ended(member):
            self.settle(member)

    # ---- ends

    def settle(self, member: Member) -> None:
        """Give back an ended member's unused room. Then its call goes on, or is over."""
        if member.call.state is CallState.EXTENDING:
            return  # `_has_more` settles it
        member.call.move(CallState.SETTLING)
        self._run.take_back(member)
        self._reclaiming.settled(member, self.ends.settle(member))

    def _start_again(self, table: PageTable) -> None:
        head = self._queues.head(table)
        if not isinstance(head, FileCall):
            return
        if head.early is not None:
            self.leave(head, None)
        elif not self._start_stretch(head, is_last_try=True):
            self._queues.next(head)

    def go_on(self, call: FileCall) -> None:
        """Start a call's next stretch. If that fails, the file's next job starts."""
        if call.early is not None:
            self.leave(call, None)
        elif not self._start_stretch(call):
            self._queues.next(call)

    def finish(self, call: FileCall, error: SymError | None) -> None:
        """Give back a call's reservation, answer the call, and start the file's next job."""
        if call.reservation is not None:
            call.reservation.abort()
        self.leave(call, error)

    def leave(self, call: FileCall, error: SymError | None) -> None:
        """Answer a call, and start the file's next job."""
        self._report(call, error)
        self._queues.next(call)

    def leave_answered(self, call: FileCall) -> None:
        """Start the file's next job. The run has answered the call, which had no deadline."""
        call.move(CallState.OVER)
        if self._recorder.is_on:
            note_answer(self._recorder, call, None)
        call.let_go()
        self._queues.next(call)

    def replace(self, call: FileCall, other: FileCall) -> None:
        """Replace the loop's first call, which is over, by a call that the run took."""
        call.move(CallState.OVER)
        other.number = call.number
        self._queues.replace(call, other)

    def _report(self, call: FileCall, error: SymError | None) -> None:
        call.move(CallState.OVER)
        if call.early is not None and error is None:
            error = call.refusal or call.cancellation()
        self._accounting.count_call(call, error)
        if self._recorder.is_on:
            note_answer(self._recorder, call, error)
        self.deadlines.forget(call)
        call.let_go()
        if call.early is not Early.GONE:
            call.end(error)


def _said(failure: Exception) -> SymError:
    """Return the error for the answer to a call that failed before it was computed."""
    if isinstance(failure, SymError):
        return kept(failure)
    log.error("a call failed before it began", exc_info=failure)
    return SymError(f"the daemon failed to take the call: {failure!r}")
