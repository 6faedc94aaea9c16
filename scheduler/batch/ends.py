"""Ends of members that have left the run: their reserved room is given back; their calls go on, or are over."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvfs.fs import FileSystem
from libsym.abi import Finish
from libsym.errors import StepFailed, SymError
from libsym.rows.native import checked
from scheduler._loop import ffi, lib
from scheduler.batch.call import FileCall, HotPred
from scheduler.batch.generation import GenerateCall
from scheduler.batch.member import Member
from scheduler.batch.standing import StandingRun
from scheduler.batch.states import Early
from scheduler.replies import kept

Then = Callable[[], None]
_FINISHES = {
    lib.SYM_END_STOP_TEXT: Finish.STOP_TEXT,
    lib.SYM_END_LENGTH: Finish.LENGTH,
    lib.SYM_END_GRAMMAR: Finish.GRAMMAR,
}


class Calls(Protocol):
    """Continuations of a call: see `CallsInFlight`."""

    def go_on(self, call: FileCall) -> None: ...

    def finish(self, call: FileCall, error: SymError | None) -> None: ...

    def leave(self, call: FileCall, error: SymError | None) -> None: ...

    def leave_answered(self, call: FileCall) -> None: ...

    def replace(self, call: FileCall, other: FileCall) -> None: ...


class Ends:
    """Settlement of members, on the trio thread."""

    def __init__(self, calls: Calls, fs: FileSystem, run: StandingRun) -> None:
        self._calls = calls
        self._fs = fs
        self._run = run

    def settle(self, member: Member) -> Then:
        """Give back a member's room; the function that this returns goes on with its call."""
        call, ended = member.call, member.ended
        error = self._step_failure(ended.error) if ended.end == lib.SYM_END_STEP else None
        if ended.end == lib.SYM_END_DEADLINE:
            call.end_early(Early.LATE)
        if member.hot is None:
            return self._settle_call(member, call, error)
        reservation = call.reservation
        assert reservation is not None
        if reservation.is_open:
            reservation.abort()
        call.reservation = None
        if isinstance(member.hot, HotPred):
            return self._settle_program(member, call, member.hot, error)
        assert isinstance(call, GenerateCall)
        return self._settle_generation(member, call, error)

    def _step_failure(self, code: int) -> SymError:
        failure = self._run.take_failure()
        said = os.strerror(code) if failure is None else str(failure)
        return StepFailed(f"the decoder failed: {said}; nothing was appended")

    # ---- calls that are over with their stretch

    def _settle_call(self, member: Member, call: FileCall, error: SymError | None) -> Then:
        ended = member.ended
        if ended.end != lib.SYM_END_DONE or call.early not in (None, Early.LATE):
            member.let_go()
            return partial(self._calls.finish, call, error)
        if call.reduction is not None and ended.error:
            call.reduction.error = row_failure(ended.error)
        if not member.rows:
            member.let_go()
            return partial(self._end_stretch, call)
        rows = member.rows

        def digested(failure: Exception | None) -> None:
            member.let_go()
            if failure is not None:
                self._calls.finish(call, SymError(f"the daemon failed to draw: {failure!r}"))
            elif call.early is Early.GONE:
                self._calls.finish(call, None)
            else:
                self._end_stretch(call)

        return partial(self._run.aside.ask, partial(call.digest, rows), digested)

    def _end_stretch(self, call: FileCall) -> None:
        """Commit the entries of a complete stretch that count. The call goes on with its next one, or ends."""
        reservation = call.reservation
        assert reservation is not None
        num_entries = call.end_stretch()
        call.num_appended += num_entries
        call.num_rejected += len(call.tokens) - num_entries
        num_reserved = len(reservation.tokens)
        reservation.commit_first(reservation.tokens[:num_entries])
        if num_entries < num_reserved:
            reservation.abort()
        self._fs.committed(call.file)
        call.reservation = None
        if not call.next_stretch() or call.early is not None:
            if call.cancellation() is not None:
                call.early = None  # its entries are there
            self._calls.leave(call, None)
        else:
            self._calls.go_on(call)

    # ---- programs

    def _settle_program(self, member: Member, call: FileCall, hot: HotPred, error: SymError | None) -> Then:
        """Settle a loop whose calls are answered but for the last, perhaps; `call` itself was the first of them."""
        ended = member.ended
        member.let_go()
        if ended.num_done == 0:
            if member.cancelled_id is not None:
                call.end_early(Early.CANCELLED)
            return partial(self._calls.leave, call, error)
        is_gone = call.early is Early.GONE
        if not is_gone and ended.end == lib.SYM_END_UNSENT:
            hot.answer(ended.call_id, ended.slot, call.file.table.length)
        if is_gone or ended.num_tokens == 0:
            return partial(self._calls.leave_answered, call)
        again = hot.again(ended.call_id, ended.slot, ended.token)
        again.stream = ended.stream
        self._calls.replace(call, again)
        if member.cancelled_id == ended.call_id:
            again.end_early(Early.CANCELLED)
        if error is None and again.early is None:
            return partial(self._calls.go_on, again)
        return partial(self._calls.leave, again, error)

    # ---- generations

    def _settle_generation(self, member: Member, call: GenerateCall, error: SymError | None) -> Then:
        ended = member.ended
        forced = ended.num_forced_taken
        generated: list[int] = ffi.unpack(ended.forced, forced) if forced else [ended.token]
        unsent = generated[len(generated) - ended.num_unsent :]
        pending: list[int] = ffi.unpack(ended.tokens, ended.num_tokens) if ended.num_tokens else []
        member.let_go()
        call.has_emitted(ended.num_to_emit)
        if ended.end == lib.SYM_END_STOP_TOKEN:
            call.stopped(Finish.STOP_TOKEN, ended.token)
        elif ended.end in _FINISHES:
            call.emit(unsent)
            call.stopped(_FINISHES[ended.end])
        elif ended.end == lib.SYM_END_DRAW:
            call.emit(unsent)
            call.failed(row_failure(ended.error))
        elif error is None and call.early is None:
            call.went_on(pending, unsent, ended.draw_index)
            if ended.is_guided:
                return partial(self._follow, call, ended.token, ended.draw_index, has_taken_forced=forced > 0)
            return partial(self._next_stretch, call)
        return partial(self._calls.leave, call, error)

    def _follow(self, call: GenerateCall, token: int, draw_index: int, *, has_taken_forced: bool) -> None:
        """Follow a draw: a decision for the next one, which may not be known yet, comes true here."""

        def decided(failure: Exception | None) -> None:
            if failure is not None:
                self._calls.leave(call, SymError(f"the daemon failed to follow the grammar: {failure!r}"))
                return
            if call.early is None:
                call.follow(has_taken_forced=has_taken_forced)
            self._next_stretch(call)

        self._run.aside.ask(lambda: _ignore(call.decide(token, draw_index)), decided)

    def _next_stretch(self, call: GenerateCall) -> None:
        if call.early is not None or not call.next_stretch():
            self._calls.leave(call, None)
        else:
            self._calls.go_on(call)


def _ignore(_: object) -> None:
    """Ignore a decision, which is the call's to keep."""


def row_failure(code: int) -> SymError:
    """Why a row could not be drawn from, or reduced."""
    try:
        checked(-code)
    except SymError as failure:
        return kept(failure)
    except MemoryError as failure:
        return kept(SymError(str(failure), errno.ENOMEM))
    raise AssertionError("nothing failed")
