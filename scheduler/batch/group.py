"""Batches that the core began. If a call of such a batch leaves the run without an answer, Python ends the call."""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

from libsym.channel.hot import HOT_FUNCTIONS
from libsym.errors import SymError
from scheduler._loop import ffi, lib
from scheduler.batch.call import PendingCall
from scheduler.wire.replies import Reply

_HOT = ffi.cast("sym_hot_functions *", HOT_FUNCTIONS)


class AnswerNumbers(NamedTuple):
    """Numbers that answer a call in place of its row."""

    answer: bytes
    block: bytes
    """Request for the numbers, a `sym_reduction`."""


def take_numbers(decode: Any) -> AnswerNumbers | None:
    """Return the numbers of a member that has ended, and free their memory in C. None: the member has no numbers."""
    numbers = decode.numbers
    if not numbers:
        return None
    answer = bytes(ffi.buffer(numbers.answer, numbers.answer_bytes))
    found = AnswerNumbers(answer, bytes(ffi.buffer(numbers.block, numbers.block_bytes)))
    lib.sym_numbers_free(_HOT, numbers)
    decode.numbers = ffi.NULL
    return found


class GroupCall:
    """Call of a `sym_group`. If this object is collected before `answer`, the call counts as over without a reply."""

    def __init__(self, loop: Any, decode: Any, asked: PendingCall) -> None:
        """Take over a call. `decode`: a `sym_decode` of a member that has ended. `asked`: the batch's request."""
        self._loop, self._number, self._asked = loop, decode.number, asked
        self._group = ffi.gc(decode.group, lib.sym_group_abandon)

    def answer(self, outcome: Reply | SymError) -> None:
        """Note the outcome of the call. With the last call of the batch, send the answer."""
        group, noted = self._group, {"number": self._number}
        if isinstance(outcome, SymError):
            payload = str(outcome).encode()[: lib.SYM_GROUP_TEXT_BYTES]
            noted["err"] = outcome.errno or errno.EIO
        else:
            payload = outcome.payload
            noted["slot"], _, noted["num_entries"] = outcome.args
        noted |= {"payload": ffi.from_buffer(payload), "bytes": len(payload)}
        if not lib.sym_loop_note(self._loop, group, ffi.new("sym_noted *", noted)):
            ffi.gc(group, None)
            return
        answer = bytes(ffi.buffer(group.payload, group.num_bytes))
        self._asked.answer(Reply((group.num,), answer, group.num_rows))
        ffi.release(group)
