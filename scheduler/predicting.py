"""PRED and PRED_BATCH: what they ask for, checked once, and made into work for the batch scheduler.

A row is answered by a result slot, which is taken before the call is queued, or by numbers (`reducing.py`). A batch
takes the slots of all its calls at once, so that no two batches wait for each other with half of theirs.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from libsym.abi import FRAME_ALIGN, HEADER_BYTES, MASKED, REDUCED, ROWS_ALL, ROWS_LAST, ROWS_NONE, Op
from libsym.channel import PAYLOAD_BYTES, Request
from libsym.errors import BadHandle, Invalid, NoAccess, SymError, TooLarge
from scheduler.batch import BatchScheduler
from scheduler.call import EntryMask, PredCall
from scheduler.decoding import decode_call
from scheduler.fields import Fields, check_priority, check_range
from scheduler.lip import Lip
from scheduler.messages import Reply, kept
from scheduler.reducing import Reduction

MAX_BATCH = 256
MAX_ERROR_BYTES = 512
"""Of a message in a batch's reply: that many calls may fail at once."""
_MASK = struct.Struct("=II")
_REQUEST = struct.Struct("=IHHIIQQqqqq")
_REPLY = struct.Struct("=IiQqqqqIIQ")
_NO_SLOTS = -1
_NO_ARGS: tuple[int, ...] = ()
_ONE_TOKEN = ((1, 0, 0, 0), (1, 1, 0, 0))
"""Arguments of a call that goes on by one token, without and with its position."""


class Limits(Protocol):
    """What the model can take."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...


class Limited:
    """What calls that append are checked against."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    @property
    def vocab_size(self) -> int:
        return self._limits.vocab_size

    def entries(self, fields: Fields, num_tokens: int, num_positions: int) -> tuple[IntArray, IntArray | None]:
        """The tokens of a call, and their positions if it has any: none, the first, or all."""
        if num_tokens < 1:
            raise Invalid("at least one token is needed: there is nothing to append")
        if num_positions not in (0, 1, num_tokens):
            raise Invalid(f"{num_tokens} tokens need {num_tokens} positions (or only the first), not {num_positions}")
        tokens = fields.int32(num_tokens, "tokens")
        check_range("token", tokens, self._limits.vocab_size, "the vocabulary")
        if num_positions == 0:
            return tokens, None
        positions = fields.int32(num_positions, "positions").astype(np.int64)
        if num_positions == 1:
            positions = positions[0] + np.arange(num_tokens)  # may go beyond 32 bits
        check_range("position", positions, self._limits.max_positions, "the model's context")
        return tokens, positions.astype(np.int32)


def appendable(lip: Lip, handle: int) -> OpenKv:
    file = lip.file(handle)
    if not file.writable:
        raise NoAccess("the file is open for reading only: open it with flags 'rw', or fork it")
    return file


@dataclass(frozen=True, slots=True)
class Wanted:
    """One PRED, checked."""

    handle: int
    file: OpenKv
    tokens: IntArray
    positions: IntArray | None
    num_rows: int
    mask: EntryMask | None
    reduction: Reduction | None
    priority: int

    @property
    def num_slots(self) -> int:
        return 0 if self.reduction is not None else self.num_rows


class Predicting:
    """Answers PRED and PRED_BATCH."""

    def __init__(self, batches: BatchScheduler, limited: Limited) -> None:
        self._batches = batches
        self._limited = limited

    def pred(self, lip: Lip, request: Request) -> None:
        if request.flags == ROWS_LAST and request.args in _ONE_TOKEN:
            self._decode(lip, request)
            return
        wanted = self._parse(lip, request)
        _Single(self._batches, lip, request.id, wanted).begin()

    def _decode(self, lip: Lip, request: Request) -> None:
        """One token and its row, which may go on as a loop of steps: the short way."""
        file = appendable(lip, request.handle)
        fields = Fields(request.payload)
        tokens, positions = self._limited.entries(fields, 1, request.args[1])
        fields.end()

        def over() -> None:
            lip.cancellable.pop(request.id, None)

        def have_row(slot: int | SymError) -> None:
            if isinstance(slot, SymError):
                over()
                lip.channel.reply(request.id, error=slot)
            elif lip.handles.get(request.handle) is not file:
                over()
                lip.free_rows(slot, 1)
                lip.channel.reply(request.id, error=_closed())
            else:
                call = decode_call(lip, file, request.handle, request.id, slot, tokens, positions, over)
                lip.cancellable[request.id] = lambda: self._batches.cancel(call)
                self._batches.submit(call)

        def cancel() -> None:
            stop_waiting()

        lip.cancellable[request.id] = cancel  # until there is a call to be cancelled
        stop_waiting = lip.take_rows(1, have_row)

    def pred_batch(self, lip: Lip, request: Request) -> None:
        """The payload is whole requests; each that is no good fails alone, but a frame that is none fails them all."""
        parts = [self._part(lip, each) for each in _frames(request)]
        _Batch(self._batches, lip, request.id, parts).begin()

    def _part(self, lip: Lip, request: Request) -> Wanted | SymError:
        try:
            return self._parse(lip, request)
        except SymError as error:
            return kept(error)

    def _parse(self, lip: Lip, request: Request) -> Wanted:
        file = appendable(lip, request.handle)
        fields = Fields(request.payload)
        num_tokens, num_positions, _, priority = request.args
        tokens, positions = self._limited.entries(fields, num_tokens, num_positions)
        num_rows = _num_rows(request.flags, num_tokens)
        mask = _mask(fields, num_tokens) if request.flags & MASKED else None
        reduction = None
        if request.flags & REDUCED:
            reduction = Reduction(fields.rest(), self._limited.vocab_size, num_tokens, num_rows)
        fields.end()
        priority = check_priority(priority)
        return Wanted(request.handle, file, tokens, positions, num_rows, mask, reduction, priority)


class _Appending:
    """One PRED between the parsing and its answer."""

    __slots__ = ("_answer", "_batches", "_call", "_first_row", "_lip", "wanted")

    def __init__(
        self, batches: BatchScheduler, lip: Lip, wanted: Wanted, answer: Callable[[Reply | SymError], None]
    ) -> None:
        self._batches = batches
        self._lip = lip
        self.wanted = wanted
        self._answer = answer
        self._call: PredCall | None = None
        self._first_row = _NO_SLOTS

    def submit(self, first_row: int) -> None:
        """Queue it; `first_row`: of its result slots, which are its own from here on."""
        wanted, self._first_row = self.wanted, first_row
        if self._lip.handles.get(wanted.handle) is not wanted.file:
            self._end(_closed())
        else:
            channel, reduction = self._lip.channel, wanted.reduction
            self._call = PredCall(
                self._lip,
                wanted.file,
                wanted.tokens,
                wanted.positions,
                tuple(channel.row(first_row + index) for index in range(wanted.num_slots)),
                self._end,
                priority=wanted.priority,
                mask=wanted.mask,
                num_digested=0 if reduction is None else wanted.num_rows,
                digest=None if reduction is None else reduction.digest,
            )
            self._batches.submit(self._call)

    def cancel(self) -> None:
        if self._call is not None:
            self._batches.cancel(self._call)

    def _end(self, error: SymError | None) -> None:
        wanted = self.wanted
        if error is not None:
            if wanted.num_slots:
                self._lip.free_rows(self._first_row, wanted.num_slots)
            self._answer(error)
            return
        if wanted.reduction is not None and wanted.reduction.error is not None:
            self._answer(wanted.reduction.error)
            return
        payload = b"" if wanted.reduction is None else wanted.reduction.answer
        first_row = self._first_row if wanted.num_slots else _NO_SLOTS
        self._answer(Reply((first_row, wanted.num_rows, wanted.file.table.length), payload))


class _Single:
    """A PRED by itself."""

    __slots__ = ("_appending", "_id", "_lip", "_stop_waiting")

    def __init__(self, batches: BatchScheduler, lip: Lip, request_id: int, wanted: Wanted) -> None:
        self._lip = lip
        self._id = request_id
        self._appending = _Appending(batches, lip, wanted, self._answer)
        self._stop_waiting = _wait_for_nothing

    def begin(self) -> None:
        lip, appending = self._lip, self._appending
        lip.cancellable[self._id] = self._cancel
        if appending.wanted.num_slots:
            self._stop_waiting = lip.take_rows(appending.wanted.num_slots, self._have_rows)
        else:
            appending.submit(_NO_SLOTS)

    def _cancel(self) -> None:
        self._stop_waiting()
        self._appending.cancel()

    def _have_rows(self, first_row: int | SymError) -> None:
        if isinstance(first_row, SymError):
            self._answer(first_row)
        else:
            self._appending.submit(first_row)

    def _answer(self, outcome: Reply | SymError) -> None:
        self._lip.cancellable.pop(self._id, None)
        if isinstance(outcome, SymError):
            self._lip.channel.reply(self._id, error=outcome)
        else:
            self._lip.channel.reply(self._id, outcome.args, outcome.payload)


class _Batch:
    """The calls of a PRED_BATCH: answered together, when the last has ended."""

    def __init__(self, batches: BatchScheduler, lip: Lip, request_id: int, parts: list[Wanted | SymError]) -> None:
        self._lip = lip
        self._id = request_id
        self._outcomes: list[Reply | SymError | None] = [None if isinstance(part, Wanted) else part for part in parts]
        self._appending = {
            index: _Appending(batches, lip, part, lambda outcome, index=index: self._ended(index, outcome))  # type: ignore[misc]
            for index, part in enumerate(parts)
            if isinstance(part, Wanted)
        }
        self._num_slots = sum(each.wanted.num_slots for each in self._appending.values())
        self._num_left = len(self._appending)
        self._stop_waiting = _wait_for_nothing
        num_bytes = sum(_part_bytes(part) for part in parts)
        if num_bytes > PAYLOAD_BYTES:
            raise TooLarge(f"the answer to this batch has {num_bytes} bytes, a message {PAYLOAD_BYTES}: use several")

    def begin(self) -> None:
        if not self._num_left:
            self._reply()
            return
        self._lip.cancellable[self._id] = self._cancel
        if self._num_slots:
            self._stop_waiting = self._lip.take_rows(self._num_slots, self._have_rows)
        else:
            self._have_rows(_NO_SLOTS)

    def _have_rows(self, first_row: int | SymError) -> None:
        if isinstance(first_row, SymError):
            self._lip.cancellable.pop(self._id, None)
            self._lip.channel.reply(self._id, error=first_row)
            return
        for each in list(self._appending.values()):
            each.submit(first_row)
            first_row += each.wanted.num_slots

    def _cancel(self) -> None:
        self._stop_waiting()
        for each in list(self._appending.values()):
            each.cancel()

    def _ended(self, index: int, outcome: Reply | SymError) -> None:
        self._outcomes[index] = outcome
        self._num_left -= 1
        if self._num_left == 0:
            self._lip.cancellable.pop(self._id, None)
            self._reply()

    def _reply(self) -> None:
        payload = b"".join(_frame(index, outcome) for index, outcome in enumerate(self._outcomes))
        self._lip.channel.reply(self._id, (len(self._outcomes),), payload)


def _wait_for_nothing() -> None:
    """Where no wait for slots can be ended."""


def _closed() -> BadHandle:
    return BadHandle("the file was closed while pred() waited for result slots")


def _num_rows(flags: int, num_tokens: int) -> int:
    match flags & (ROWS_NONE | ROWS_LAST | ROWS_ALL):
        case value if value == ROWS_NONE:
            return 0
        case value if value == ROWS_LAST:
            return 1
        case value if value == ROWS_ALL:
            return num_tokens
        case _:
            raise Invalid("pred() wants no row, the last row or all rows")


def _mask(fields: Fields, num_tokens: int) -> EntryMask:
    """From `struct sym_mask` and its rows. Whether it fits the file is seen when the call's turn has come."""
    num_rows, num_columns = fields.unpack(_MASK, "a mask")
    if num_rows not in (1, num_tokens):
        raise Invalid(f"a mask of {num_rows} rows: one for all {num_tokens} new tokens, or one for each")
    row_bytes = -(-num_columns // 32) * 4
    packed = np.frombuffer(fields.take(num_rows * row_bytes, "the mask's rows"), np.uint8).reshape(num_rows, row_bytes)
    return EntryMask(packed, num_columns)


def _frames(batch: Request) -> list[Request]:
    """The requests in a batch's payload. Invalid: what is announced is not what is there."""
    count, payload = batch.args[0], batch.payload
    if not 1 <= count <= MAX_BATCH:
        raise Invalid(f"a batch of {count} calls: 1 to {MAX_BATCH} are possible")
    fields = Fields(payload)
    found = []
    for index in range(count):
        frame_bytes, op, zero, flags, zero2, call_id, handle, *args = fields.unpack(_REQUEST, f"call {index}")
        if op != Op.PRED or zero or zero2 or frame_bytes < HEADER_BYTES:
            raise Invalid(f"call {index} of the batch is no pred(): operation {op}, {frame_bytes} bytes")
        body = fields.take(frame_bytes - HEADER_BYTES, f"call {index}")
        fields.take(-frame_bytes % FRAME_ALIGN, f"the padding of call {index}")
        found.append(Request(Op.PRED, flags, call_id, handle, tuple(args), body))
    fields.end()
    return found


def _part_bytes(part: Wanted | SymError) -> int:
    """The room that the answer to one call may take."""
    reduced = part.reduction.num_bytes if isinstance(part, Wanted) and part.reduction is not None else 0
    return HEADER_BYTES + -(-max(reduced, MAX_ERROR_BYTES) // FRAME_ALIGN) * FRAME_ALIGN


def _frame(index: int, outcome: Reply | SymError | None) -> bytes:
    """A reply as it would lie in the ring."""
    assert outcome is not None
    if isinstance(outcome, SymError):
        code, args, payload = outcome.errno or errno.EIO, _NO_ARGS, str(outcome).encode()[:MAX_ERROR_BYTES]
    else:
        code, args, payload = 0, outcome.args, outcome.payload
    header = _REPLY.pack(HEADER_BYTES + len(payload), code, index, *(*args, 0, 0, 0, 0)[:4], 0, 0, 0)
    return header + payload + bytes(-len(payload) % FRAME_ALIGN)
