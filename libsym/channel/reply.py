"""Replies to calls, and the ownership of their slots, handles and messages."""

from __future__ import annotations

import struct
from typing import Any, Self

from libsym._channel import ffi, lib
from libsym.abi import HEADER_BYTES, MORE
from libsym.errors import ProtocolError, SymError, error_for

_HEAD = struct.Struct("=4qiIII")  # the first fields of sym_result
_RESULT_BYTES: int = lib.SYM_RESULT_BYTES
_NOTHING = ffi.NULL


class Reply:
    """The reply to a request. A reply owns its slots, handle or message until `rows()` or `claim()` takes them over.

    Ctrl-C may raise its exception at the beginning of a function and after any function call. So no function call
    stands between the line that takes an answer from a C struct and `ffi.gc`: an answer always has an owner.
    """

    __slots__ = ("_answer", "args", "channel", "error", "more", "payload")

    _answer: Any
    channel: Any
    """The ClientChannel of the reply. The type is Any, because the module of ClientChannel imports this module."""
    args: list[int]
    payload: bytes
    more: bool
    """Whether more replies to the same request follow."""
    error: SymError | None
    """The error of a failed call. The channel raises it, except for the parts of a batch."""

    @classmethod
    def of_result(cls, result: Any, view: memoryview, channel: Any) -> Self:
        """Make a reply from a sym_result, whose bytes are `view`, and take over its answer."""
        a, b, c, d, err, flags, payload_bytes, is_whole = _HEAD.unpack_from(view)
        self = cls.__new__(cls)
        if is_whole:
            self._answer = None
        else:
            answer, result.answer = result.answer, _NOTHING
            self._answer = answer = ffi.gc(answer, lib.sym_answer_drop)
        self.channel = channel
        self.args = [a, b, c, d]
        if not payload_bytes:
            self.payload = b""
        elif payload_bytes <= _RESULT_BYTES:
            self.payload = view[_HEAD.size : _HEAD.size + payload_bytes].tobytes()
        else:
            self.payload = ffi.unpack(answer.payload, payload_bytes)
        self.more = flags != 0
        self.error = error_for(err, self.payload.decode(errors="replace")) if err else None
        return self

    @classmethod
    def of_answer(cls, answer: Any, channel: Any) -> Self:
        """Make a reply from a sym_answer. If `ffi.gc` owns the answer, the last reference drops the answer."""
        self = cls.__new__(cls)
        self._answer = answer
        self.channel = channel
        self.args = ffi.unpack(answer.args, 4)
        self.payload = ffi.unpack(answer.payload, answer.payload_bytes) if answer.payload_bytes else b""
        self.more = bool(answer.flags & MORE)
        self.error = error_for(answer.err, self.payload.decode(errors="replace")) if answer.err else None
        return self

    def own(self, answer: Any) -> None:
        """Take over the sym_answer from which the reply was made."""
        self._answer = answer

    def claim(self) -> int:
        """Take over the handle or the message of the reply. Return the handle, which the caller closes."""
        if self._answer:
            self._answer.claimed = 1
        return self.args[0]

    def rows(self) -> Any:
        """Return the first row of the result slots, a `float *`. The slots are freed with the last reference to the
        row.
        """
        first_row = self._answer.rows if self._answer else _NOTHING
        if first_row == _NOTHING:
            raise ProtocolError(f"the daemon named result slots that do not exist: {self.args[:2]}")
        answer = self._answer
        # The row keeps the closure alive, and the closure keeps the answer alive. The answer's destructor frees the
        # slots exactly once.
        return ffi.gc(first_row, lambda _row: answer)

    def parts(self) -> list[Reply]:
        """Return the replies to the calls of a PRED_BATCH, in order. Each reply owns its slots, or has an `error`."""
        most = self.args[0]
        if not 1 <= most <= len(self.payload) // HEADER_BYTES:
            raise ProtocolError(f"the daemon answered a batch with {len(self.payload)} bytes for {most} calls")
        count = lib.sym_answer_split(self._answer, most) if self._answer else -1
        if count < 0:
            raise ProtocolError("the daemon's answer to a batch is malformed")
        return [self._next_part() for _ in range(count)]

    def _next_part(self) -> Reply:
        part = self._answer.parts
        self._answer.parts = part.next
        return Reply.of_answer(ffi.gc(part, lib.sym_answer_drop), self.channel)
