"""The call that a decode loop makes: one token, one row. It may go on without the gate (see `HotPred`)."""

from __future__ import annotations

import numpy as np

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from libsym.errors import SymError
from scheduler.batch.call import HotPred, PredCall
from scheduler.connection.system_call import SystemCall
from scheduler.replies import Reply


def decode_call(call: SystemCall, file: OpenKv, slot: int, tokens: IntArray, positions: IntArray | None) -> PredCall:
    """One token for a file, whose row goes to a result slot."""
    lip, request, channel = call.lip, call.request, call.lip.channel

    def answer(request_id: int, slot: int, num_entries: int) -> None:
        channel.reply(request_id, (slot, 1, num_entries), num_rows=1)

    def again(request_id: int, slot: int, token: int) -> PredCall:
        same = SystemCall(lip, request._replace(id=request_id))
        return decode_call(same, file, slot, np.array([token], np.int32), None)

    def finished(error: SymError | None) -> None:
        if error is None:
            call.answer(Reply((slot, 1, file.table.length), num_rows=1))
        else:
            lip.free_rows(slot, 1)
            call.answer(error)

    return PredCall(
        lip,
        file,
        tokens,
        positions,
        (channel.row(slot),),
        finished,
        hot=HotPred(
            channel=channel,
            handle=request.handle,
            request_id=request.id,
            slot=slot,
            wake=lip.wake,
            entered=call.forget,  # and if the run answers it, nobody speaks of the call any more
            answer=answer,
            again=again,
        ),
    )
