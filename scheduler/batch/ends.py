"""Ends of members that have left the run. Their unused room is given back, and their calls go on or are over."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kvfs.fs import FileSystem
from libsym.errors import StepFailed, SymError
from scheduler._loop import lib
from scheduler.batch.call import NO_SLOTS, FileCall, PredCall
from scheduler.batch.generation import GenerateCall
from scheduler.batch.group import AnswerNumbers, take_numbers
from scheduler.batch.member import Member
from scheduler.batch.reduction import Reduction, row_failure
from scheduler.batch.standing import StandingRun
from scheduler.batch.states import Early
from scheduler.wire.replies import Reply

Then = Callable[[], None]


class Calls(Protocol):
    """Functions of `CallsInFlight` that continue or end a call."""

    def go_on(self, call: FileCall) -> None: ...

    def finish(self, call: FileCall, error: SymError | None) -> None: ...

    def leave(self, call: FileCall, error: SymError | None) -> None: ...

    def leave_answered(self, call: FileCall) -> None: ...

    def replace(self, call: FileCall, other: FileCall) -> None: ...


class Ends:
    """Settles members that have left the run, on the trio thread."""

    def __init__(self, calls: Calls, fs: FileSystem, run: StandingRun) -> None:
        self._calls = calls
        self._fs = fs
        self._run = run

    def settle(self, member: Member) -> Then:
        """Give back a member's room. Return the function that continues its call."""
        call, ended = member.call, member.record
        error = self._step_failure(ended.error) if ended.end == lib.SYM_END_STEP else None
        if ended.end == lib.SYM_END_DEADLINE:
            call.end_early(Early.LATE)
        if member.kind == lib.SYM_CALL:
            return self._settle_call(member, call, error)
        reservation = call.reservation  # None: a branch had used up its room before Python had objects of it
        if reservation is not None and reservation.is_open:
            reservation.abort()
        call.reservation = None
        if isinstance(call, PredCall):
            return self._settle_program(member, call, error)
        assert isinstance(call, GenerateCall)
        return self._settle_generation(member, call, error)

    def _step_failure(self, code: int) -> SymError:
        failure = self._run.take_failure()
        said = os.strerror(code) if failure is None else str(failure)
        return StepFailed(f"the decoder failed: {said}; nothing was appended")

    # ---- calls of one stretch

    def _settle_call(self, member: Member, call: FileCall, error: SymError | None) -> Then:
        ended = member.record
        member.let_go()
        if ended.end != lib.SYM_END_DONE or call.early not in (None, Early.LATE):
            return partial(self._calls.finish, call, error)
        if call.reduction is not None and ended.error:
            call.reduction.error = row_failure(ended.error)
        return partial(self._commit, call)

    def _commit(self, call: FileCall) -> None:
        """Commit a complete stretch, and answer."""
        reservation = call.reservation
        assert reservation is not None
        call.num_appended += len(call.tokens)
        reservation.commit_first(call.tokens)
        self._fs.committed(call.file)
        call.reservation = None
        call.early = None  # a late call still succeeds: all its entries are committed
        self._calls.leave(call, None)

    # ---- programs

    def _settle_program(self, member: Member, call: PredCall, error: SymError | None) -> Then:
        """Settle a program's loop. The run has answered all its calls except perhaps the last.

        `call`: the loop's first call.
        """
        ended = member.record
        of_batch, numbers = self._run.stays.group_call(ended), take_numbers(ended.decode)
        answer = None if of_batch is None else of_batch.answer
        member.let_go()
        if ended.num_done == 0:
            if member.cancelled_id is not None:
                call.end_early(Early.CANCELLED)
            if answer is not None:
                call.answer_by(answer)
            return partial(self._calls.leave, call, error)
        call.slot = NO_SLOTS  # the program has the slot, with the answer
        is_gone = call.early is Early.GONE
        if not is_gone and ended.end == lib.SYM_END_UNSENT:
            assert call.asked is not None
            (answer or call.asked.again(ended.call_id).answer)(_unsent(ended, call, numbers))
        if is_gone or ended.num_tokens == 0:
            return partial(self._calls.leave_answered, call)
        again = call.again(ended.call_id, ended.decode.slot, ended.decode.token, answer)
        if numbers is not None:
            again.reduce_by(Reduction(numbers.block, self._run.vocab_size, 1))
        again.stream = ended.stream
        self._calls.replace(call, again)
        if member.cancelled_id == ended.call_id:
            again.end_early(Early.CANCELLED)
        if error is None and again.early is None:
            return partial(self._calls.go_on, again)
        return partial(self._calls.leave, again, error)

    # ---- generations

    def _settle_generation(self, member: Member, call: GenerateCall, error: SymError | None) -> Then:
        is_over = member.record.end == lib.SYM_END_DONE
        member.let_go()
        if is_over or error is not None:
            return partial(self._calls.leave, call, error)
        call.begin_again()
        return partial(self._calls.go_on, call)


def _unsent(ended: Any, call: PredCall, numbers: AnswerNumbers | None) -> Reply | SymError:
    """Return the answer of a program's call that was computed and not answered."""
    if ended.error:
        return row_failure(ended.error)
    args = int(ended.decode.slot), 1, call.file.table.length
    return Reply(args, num_rows=1) if numbers is None else Reply(args, numbers.answer)
