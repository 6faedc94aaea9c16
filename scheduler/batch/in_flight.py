"""Calls in flight: from their place in a file's queue to their answer.

The life of a call: *queued* behind earlier work on the same file, and until it has its result slots; *in the run* as a
member, once its entries are reserved; *over* when all are committed or all are given back. `ends.py` has what becomes
of a member that has left. A call is atomic: a failure in any of its chunks leaves the file as it was.

A step may touch pages of a file in the run, so whatever frees some waits for its place in the queue. A program that has
its answer and thinks keeps nobody waiting: its file leaves the run for anything else that is to be done to it.
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
from scheduler.replies import kept
from scheduler.trace.recorder import Recorder

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
        """Calls of all files, queued or begun."""
        self._run.take_over()
        return self._queues.calls()

    def adopt(self, core: Any) -> None:
        """A call of the core's is as any other from now on: its branch, a `core_table`, has objects."""
        self._queues.adopt(self._run.adopt(lib.sym_stay_of(core)).call)

    # ---- what others ask

    def submit(self, call: FileCall) -> None:
        """Run a call after everything submitted before it for the same file."""
        self.deadlines.add(call)
        member = self._run.member_of(call.file.table)
        if member is not None and self._run.take(member, call):
            call.move(CallState.OVER)  # the run answers; in traces it is one more of the member's stream
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
        """Run `action` when no earlier call by this very handle is in flight. Those that wait for rows end at once."""
        for call in self._queues.without_rows(file):
            if call.state is CallState.WAITS_FOR_SLOTS:  # not ended or given slots by the end of one before
                self.refuse(call, BadHandle("the file was closed while pred() waited for result slots"))
        if not self._queues.when_unused(file, action):
            member = self._run.member_of(file.table)
            if member is not None and member.call.file is file:
                self._retire(member)

    def have_rows(self, call: FileCall) -> None:
        """A call that waited for its result slots has them: it begins, if it is its turn."""
        call.move(CallState.QUEUED)
        if self._queues.is_head(call):
            self._queues.start(call.file.table)

    def refuse(self, call: FileCall, error: SymError) -> None:
        """A call that waits for result slots gets none: it ends in its place, and the next one goes on."""
        assert call.state is CallState.WAITS_FOR_SLOTS
        self._take_out(call, error)

    def cancel(self, call: FileCall) -> None:
        """End a call early."""
        if call.early is None:
            self._end_early(call, Early.CANCELLED)

    def cancel_taken(self, channel: ServerChannel, call_id: int) -> bool:
        """End a call that the run took by itself. False: it computes none with this id."""
        member = self._run.find_taken(channel, call_id)
        if member is None:
            return False
        member.cancelled_id = call_id % 2**64
        self._leave(member, LEAVE_NOW)
        return True

    def expire(self, call: FileCall) -> None:
        """Cancel a call whose deadline has passed; the step under way may still end it well."""
        if call.early is None:
            self._end_early(call, Early.LATE)

    def drop(self, caller: Caller) -> None:
        """Forget a connection's calls; entries that a step is computing are given back when the step ends."""
        self._run.gone(caller)
        calls = self._queues.calls_of(caller)
        for call in calls:
            call.end_early(Early.GONE)  # before any of them ends: none is begun, and none is answered
        for call in calls:
            self._end_early(call, Early.GONE)

    def stop(self, program: Program, error: SymError) -> None:
        """End all calls of a program."""
        for call in self._queues.calls():
            if call.caller.program is program and call.early is None:
                call.refusal = error
                self._end_early(call, Early.REFUSED)

    def forget(self, program: Program) -> None:
        """Forget a program that has gone with its connections."""
        self._run.shares.forget(program)

    def state_of(self, call: FileCall) -> CallState | None:
        """Give the state of a queued or begun call. None: its program has the answer, and thinks."""
        if call.state in IN_THE_RUN:
            return self._run.state_of(self._member_of(call))
        return call.state

    def _member_of(self, call: FileCall) -> Member:
        member = self._run.member_of(call.file.table)
        assert member is not None
        assert member.call is call
        return member

    def _end_early(self, call: FileCall, why: Early) -> None:
        """End a call's work: with its step, or when it comes back from where it is meanwhile."""
        call.end_early(why)
        match call.state:
            case CallState.WAITS_FOR_SLOTS | CallState.QUEUED:
                self._take_out(call, None)
            case CallState.WAITS_FOR_PAGES:
                assert call.ticket is not None
                self._pager.cancel(call.ticket)
                call.ticket = None  # it refers to the call
                self.finish(call, None)
            case CallState.RUNNING | CallState.EXTENDING:
                self._leave(self._member_of(call), LEAVE_NOW)

    def _take_out(self, call: FileCall, error: SymError | None) -> None:
        """End a call that waits in its file's queue. The head of one ends in its place if it waits for slots there."""
        if self._queues.take_out(call):
            self._report(call, error)
            self._queues.left(call)
        elif call.state is CallState.WAITS_FOR_SLOTS:
            self.leave(call, error)

    def _retire(self, member: Member) -> None:
        """A program that thinks does not keep others from its file."""
        if member.loop is not None:
            self._leave(member, LEAVE_ANSWERED)

    def _leave(self, member: Member, how: int) -> None:
        if self._run.leave(member, how):
            self.settle(member)

    # ---- stretches

    def _start(self, job: Job) -> bool:
        """Start the head of a queue. False: it is over already. Whatever goes wrong, the next ones get their turn."""
        if isinstance(job, Action):
            do(job.do)
        elif job.early is not None:
            self._report(job, None)
        else:
            return job.state is CallState.WAITS_FOR_SLOTS or self._start_stretch(job)
        return False

    def _start_stretch(self, call: FileCall, *, is_last_try: bool = False) -> bool:
        """Reserve what a call's stretch appends; then it joins the run. False: it has failed, and is over.

        One that finds no room is started again when others have given back what they have reserved and not used.
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
        """Have all pages of a call's file in memory."""
        assert call.reservation is not None
        call.ticket = self._pager.acquire(call.reservation, priority_of(call), partial(self._has_pages, call))
        if call.ticket is None:
            self._enter(call)
        else:
            call.move(CallState.WAITS_FOR_PAGES)

    def _has_pages(self, call: FileCall, error: SymError | None) -> None:
        """Go on with a call whose pages are there, or will not be."""
        call.ticket = None
        if error is not None:
            self.finish(call, kept(error))
            return
        try:
            self._enter(call)
        except Exception as failure:  # noqa: BLE001 - it is reported
            self.finish(call, _said(failure))

    def _enter(self, call: FileCall) -> None:
        """Into the run, as soon as no page has bytes of others in it."""
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
        """A loop over pred() that others wait behind already is to leave when its first call is answered."""
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

    # ---- more room for those in the run

    def extend(self, member: Member) -> None:
        """Give a member more room before it has used up its own."""
        reservation = member.call.reservation
        if reservation is None or not reservation.is_open or not self._room.extend(member.call, reservation):
            return  # all of it is used up already: the file gets room as any other, when it goes on
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
        """Give back room that an ended member has reserved and not used. Then its call goes on, or is over."""
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
        """With its next stretch; or it has failed, and it is the next job's turn."""
        if call.early is not None:
            self.leave(call, None)
        elif not self._start_stretch(call):
            self._queues.next(call)

    def finish(self, call: FileCall, error: SymError | None) -> None:
        """Give a call's entries back, answer it, and start the file's next job."""
        if call.reservation is not None:
            call.reservation.abort()
        self.leave(call, error)

    def leave(self, call: FileCall, error: SymError | None) -> None:
        """Answer a call, and start the file's next job."""
        self._report(call, error)
        self._queues.next(call)

    def leave_answered(self, call: FileCall) -> None:
        """Start the file's next job: the run has answered the call, which had no deadline."""
        call.move(CallState.OVER)
        if self._recorder.is_on:
            note_answer(self._recorder, call, None)
        call.let_go()
        self._queues.next(call)

    def replace(self, call: FileCall, other: FileCall) -> None:
        """Put a call that the run has made in another's place, for the same program and handle."""
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
    """Give the error that a call is told which failed before it was computed."""
    if isinstance(failure, SymError):
        return kept(failure)
    log.error("a call failed before it began", exc_info=failure)
    return SymError(f"the daemon failed to take the call: {failure!r}")
