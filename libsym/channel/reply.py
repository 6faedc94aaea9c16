"""Replies: what a call brought, and who owns it."""

from __future__ import annotations

import struct
from typing import Any, Self

from libsym._channel import ffi, lib
from libsym.abi import HEADER_BYTES, MORE
from libsym.errors import ProtocolError, SymError, error_for

_HEAD = struct.Struct("=4qiIII")  # of sym_result
_RESULT_BYTES: int = lib.SYM_RESULT_BYTES
_NOTHING = ffi.NULL


class Reply:
    """The answer to a request. It owns its slots, handle or message until `rows()` or `claim()` takes them over.

    Ctrl-C may raise its exception where a function begins or has been called. So no call stands between a C struct's
    letting go of an answer and `ffi.gc`: what a call brought is always somebody's.
    """

    __slots__ = ("_answer", "args", "channel", "error", "more", "payload")

    _answer: Any
    channel: Any
    """The ClientChannel that it came by, whose file is built on this one."""
    args: list[int]
    payload: bytes
    more: bool
    """Whether other replies follow to the same request."""
    error: SymError | None
    """How the call failed. (It is raised, except for the parts of a batch.)"""

    @classmethod
    def of_result(cls, result: Any, view: memoryview, channel: Any) -> Self:
        """Takes what is in a sym_result, whose bytes are `view`."""
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
        """Read a sym_answer, which is dropped with its last reference if it was given to `ffi.gc`."""
        self = cls.__new__(cls)
        self._answer = answer
        self.channel = channel
        self.args = ffi.unpack(answer.args, 4)
        self.payload = ffi.unpack(answer.payload, answer.payload_bytes) if answer.payload_bytes else b""
        self.more = bool(answer.flags & MORE)
        self.error = error_for(answer.err, self.payload.decode(errors="replace")) if answer.err else None
        return self

    def own(self, answer: Any) -> None:
        """Takes over the sym_answer that it was made of."""
        self._answer = answer

    def claim(self) -> int:
        """The handle that the call opened, which the caller closes from now on; or says that a message was taken."""
        if self._answer:
            self._answer.claimed = 1
        return self.args[0]

    def rows(self) -> Any:
        """The first row of the result slots, a `float *`. They are free again when all that was made of it is gone."""
        first_row = self._answer.rows if self._answer else _NOTHING
        if first_row == _NOTHING:
            raise ProtocolError(f"the daemon named result slots that do not exist: {self.args[:2]}")
        answer = self._answer
        # row -> closure -> answer: the slots are released by the answer's own destructor, exactly once.
        return ffi.gc(first_row, lambda _row: answer)

    def parts(self) -> list[Reply]:
        """The replies to the calls of a PRED_BATCH, in order; each owns its own slots, or has an `error`."""
        most = self.args[0]
        if not 1 <= most <= len(self.payload) // HEADER_BYTES:
            raise ProtocolError(f"the daemon answered a batch with {len(self.payload)} bytes for {most} calls")
        count = lib.sym_answer_split(self._answer, most) if self._answer else -1
        if count < 0:
            raise ProtocolError("the daemon answered a batch with something that is none")
        return [self._next_part() for _ in range(count)]

    def _next_part(self) -> Reply:
        part = self._answer.parts
        self._answer.parts = part.next
        return Reply.of_answer(ffi.gc(part, lib.sym_answer_drop), self.channel)
