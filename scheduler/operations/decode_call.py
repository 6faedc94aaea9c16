"""The call that a decode loop makes: one token, one row. It may go on without the gate (see `HotPred`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from libsym.errors import SymError
from scheduler.batch.call import HotPred, PredCall
from scheduler.connection.lip import Lip


def decode_call(
    lip: Lip,
    file: OpenKv,
    handle: int,
    request_id: int,
    slot: int,
    tokens: IntArray,
    positions: IntArray | None,
    entered: Callable[[], None],
) -> PredCall:
    """One token for a file, whose row goes to a result slot; `entered` is called when it can't be cancelled any more.

    It is called again when the call is over, which may be without having entered the loop of steps.
    """
    channel = lip.channel

    def answer(request_id: int, slot: int, num_entries: int) -> None:
        channel.reply(request_id, (slot, 1, num_entries), num_rows=1)

    def again(request_id: int, slot: int, token: int) -> PredCall:
        return decode_call(lip, file, handle, request_id, slot, np.array([token], np.int32), None, lambda: None)

    def finished(error: SymError | None) -> None:
        entered()
        if error is None:
            answer(request_id, slot, file.table.length)
        else:
            lip.free_rows(slot, 1)
            channel.reply(request_id, error=error)

    return PredCall(
        lip,
        file,
        tokens,
        positions,
        (channel.row(slot),),
        finished,
        hot=HotPred(
            channel=channel,
            handle=handle,
            request_id=request_id,
            slot=slot,
            wake=lip.wake,
            entered=entered,
            answer=answer,
            again=again,
        ),
    )
