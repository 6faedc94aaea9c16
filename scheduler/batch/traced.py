"""Records of calls and steps for a trace. These functions run only while a recording is on."""

from __future__ import annotations

import errno
import time

import numpy as np

from libsym.errors import SymError
from scheduler.batch.call import FileCall
from scheduler.batch.states import Early
from scheduler.trace.recorder import Recorder
from scheduler.trace.records import NO_DEADLINE, STEP, Records


def note_arrival(recorder: Recorder, call: FileCall) -> None:
    """Record the arrival of a call. The call may have arrived some time ago."""
    table = call.file.table
    inode = call.file.inode
    accounts = table.pool.accounts.of(table.owner).numbers
    recorder.arrived(
        call.number,
        call.caller.pid,
        call.caller.uid,
        accounts,
        inode.number,
        table.length,
        len(call.tokens),
        call.kind,
        call.priority,
        None if call.deadline_s is None else _ns(call.deadline_s),
        _ns(call.submitted_s),
    )
    recorder.of_file(inode.number, call.file.content.forked_from, is_named=bool(inode.names))


def note_answer(recorder: Recorder, call: FileCall, error: SymError | None) -> None:
    """Record the end of a call, even if its program has gone."""
    code = 0 if error is None else error.errno or errno.EIO
    recorder.answered(
        call.number, call.num_appended, errno.ECONNRESET if call.early is Early.GONE else code, time.monotonic_ns()
    )


def traced_steps(found: Records, seats: Records) -> tuple[Records, Records]:
    """Convert the run's records of steps to those of a trace, and return them with the seats."""
    steps = np.zeros(len(found), STEP)
    for name in STEP.names or ():
        if name in (found.dtype.names or ()):
            steps[name] = found[name]
    return steps, seats


def _ns(seconds: float) -> int:
    return min(int(seconds * 1e9), NO_DEADLINE)
