"""What becomes of a run's calls when it is over: what they had reserved is given back; each goes on, or ends."""

from __future__ import annotations

from libsym.abi import Finish
from libsym.errors import SymError
from scheduler._loop import lib as loop
from scheduler.batch.arrivals import Arrivals
from scheduler.batch.call import FileCall
from scheduler.batch.generation import GenerateCall
from scheduler.batch.in_flight import CallsInFlight
from scheduler.batch.run import COMPUTING, Member, Run


def settle_run(run: Run, calls: CallsInFlight, arrivals: Arrivals, error: SymError | None) -> None:
    """`error`: of its last step."""
    for member in run.members:
        member.let_go()
        _give_back(member, calls)
    calls.start_short()
    for member in run.members:
        if isinstance(member.call, GenerateCall):
            _settle_generation(member.call, member, calls, error)
        else:
            _settle_program(member.call, member, calls, arrivals, error)


def _give_back(member: Member, calls: CallsInFlight) -> None:
    call, reservation = member.call, member.call.reservation
    assert reservation is not None
    call.is_running = False
    del calls.ready[call]
    if member.num_done < len(member.log):
        reservation.abort()
    call.reservation = None


def _settle_generation(call: GenerateCall, member: Member, calls: CallsInFlight, error: SymError | None) -> None:
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
        calls.go_on(call)
        return
    calls.leave(call, error)


def _settle_program(
    call: FileCall, member: Member, calls: CallsInFlight, arrivals: Arrivals, error: SymError | None
) -> None:
    """Its calls are answered but for the last, perhaps; `call` itself was the first of them."""
    hot = member.hot
    assert hot is not None
    if member.num_done == 0:
        calls.leave(call, error)
        return
    if not call.is_dropped:
        if member.end == loop.SYM_END_UNSENT:
            hot.answer(member.call_id, member.slot, call.file.table.length)
        if member.state == COMPUTING:
            again = hot.again(member.call_id, member.slot, member.token)
            calls.replace(call, again)
            if error is None:
                calls.go_on(again)
            else:
                calls.leave(again, error)
            return
        arrivals.note_answer(call.caller)
    calls.leave_answered(call)
