"""PRED and PRED_BATCH: what they ask for, checked once, and made into work for the batch scheduler.

A row is answered by a result slot, which is taken before the call is queued, or by numbers (`reducing.py`). A batch
takes the slots of all its calls at once, so that no two batches wait for each other with half of theirs.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from libsym.abi import (
    FRAME_ALIGN,
    HEADER_BYTES,
    MASK_STRUCT,
    MASKED,
    MAX_BATCH,
    REDUCED,
    REPLY_STRUCT,
    REQUEST_STRUCT,
    ROWS_ALL,
    ROWS_LAST,
    ROWS_NONE,
    Op,
)
from libsym.channel.server import PAYLOAD_BYTES, Request
from libsym.errors import BadHandle, Invalid, NoAccess, SymError, TooLarge
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import EntryMask, PredCall
from scheduler.batch.reduction import Reduction
from scheduler.connection.lip import Lip
from scheduler.connection.slots import Then
from scheduler.connection.system_call import SystemCall
from scheduler.operations.decode_call import decode_call
from scheduler.operations.operation import Operation, Table
from scheduler.payloads import Fields, check_priority, check_range, deadline_of
from scheduler.replies import Reply, kept

MAX_ERROR_BYTES = 512
"""Of a message in a batch's reply: that many calls may fail at once."""
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
        if num_positions == 0 and num_tokens > self._limits.max_positions:
            raise Invalid(
                f"{num_tokens} tokens end beyond the model's context of {self._limits.max_positions}, also in an empty "
                "file: use fewer, or give positions"
            )
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
    deadline_s: float | None

    @property
    def num_slots(self) -> int:
        return 0 if self.reduction is not None else self.num_rows


class Predicting:
    """Answers PRED and PRED_BATCH."""

    def __init__(self, batches: BatchScheduler, limited: Limited) -> None:
        self._batches = batches
        self._limited = limited

    def table(self) -> Table:
        return {Op.PRED: Operation(self.pred), Op.PRED_BATCH: Operation(self.pred_batch)}

    def pred(self, call: SystemCall) -> None:
        """One token and its row may go on as a loop of steps: that is the short way."""
        if call.request.flags == ROWS_LAST and call.request.args in _ONE_TOKEN:
            self._decode(call)
            return
        wanted = self._parse(call.lip, call.request)
        appending = _Appending(call.lip, wanted, call.answer)

        def have_rows(first_row: int | SymError) -> None:
            if isinstance(first_row, SymError):
                call.answer(first_row)
            elif (pred := appending.call(first_row)) is not None:
                self._submit(call, pred)

        _when_rows(call, wanted.num_slots, have_rows)

    def _decode(self, call: SystemCall) -> None:
        lip, request = call.lip, call.request
        file = appendable(lip, request.handle)
        fields = Fields(request.payload)
        tokens, positions = self._limited.entries(fields, 1, request.args[1])
        fields.end()

        def have_row(slot: int | SymError) -> None:
            if isinstance(slot, SymError):
                call.answer(slot)
            elif lip.handles.get(request.handle) is not file:
                lip.free_rows(slot, 1)
                call.answer(_closed())
            else:
                self._submit(call, decode_call(call, file, slot, tokens, positions))

        _when_rows(call, 1, have_row)

    def _submit(self, call: SystemCall, *preds: PredCall) -> None:
        def cancel() -> None:
            for pred in preds:
                self._batches.cancel(pred)

        call.when_cancelled(cancel)
        for pred in preds:
            self._batches.submit(pred)

    def pred_batch(self, call: SystemCall) -> None:
        """The payload is whole requests; each that is no good fails alone, but a frame that is none fails them all."""
        parts = [self._part(call.lip, each) for each in _frames(call.request)]
        batch = _Batch(call, parts)
        appending = [
            _Appending(call.lip, part, partial(batch.ended, index))
            for index, part in enumerate(parts)
            if isinstance(part, Wanted)
        ]

        def have_rows(first_row: int | SymError) -> None:
            if isinstance(first_row, SymError):
                call.answer(first_row)
                return
            preds = []
            for each in appending:
                if (pred := each.call(first_row)) is not None:
                    preds.append(pred)
                first_row += each.wanted.num_slots
            if preds:
                self._submit(call, *preds)

        if appending:
            _when_rows(call, sum(each.wanted.num_slots for each in appending), have_rows)
        else:
            batch.answer()

    def _part(self, lip: Lip, request: Request) -> Wanted | SymError:
        try:
            return self._parse(lip, request)
        except SymError as error:
            return kept(error)

    def _parse(self, lip: Lip, request: Request) -> Wanted:
        file = appendable(lip, request.handle)
        fields = Fields(request.payload)
        num_tokens, num_positions, deadline_us, priority = request.args
        tokens, positions = self._limited.entries(fields, num_tokens, num_positions)
        num_rows = _num_rows(request.flags, num_tokens)
        mask = _mask(fields, num_tokens) if request.flags & MASKED else None
        reduction = None
        if request.flags & REDUCED:
            reduction = Reduction(fields.rest(), self._limited.vocab_size, num_tokens, num_rows)
        fields.end()
        priority, deadline_s = check_priority(priority), deadline_of(deadline_us)
        return Wanted(request.handle, file, tokens, positions, num_rows, mask, reduction, priority, deadline_s)


class _Appending:
    """One PRED between the parsing and its answer.

    It is what the queued call refers to, and refers to no call: so what the program sent is freed with the answer, or
    when the program has gone, and not only when the collector comes by.
    """

    __slots__ = ("_answer", "_first_row", "_lip", "wanted")

    def __init__(self, lip: Lip, wanted: Wanted, answer: Callable[[Reply | SymError], None]) -> None:
        self._lip = lip
        self.wanted = wanted
        self._answer = answer
        self._first_row = _NO_SLOTS

    def call(self, first_row: int) -> PredCall | None:
        """To be queued; `first_row`: of its result slots, which are its own from here on. None: it is answered."""
        wanted, self._first_row = self.wanted, first_row
        if self._lip.handles.get(wanted.handle) is not wanted.file:
            self._end(_closed())
            return None
        channel, reduction = self._lip.channel, wanted.reduction
        return PredCall(
            self._lip,
            wanted.file,
            wanted.tokens,
            wanted.positions,
            tuple(channel.row(first_row + index) for index in range(wanted.num_slots)),
            self._end,
            priority=wanted.priority,
            deadline_s=wanted.deadline_s,
            mask=wanted.mask,
            num_digested=0 if reduction is None else wanted.num_rows,
            digest=None if reduction is None else reduction.digest,
        )

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
        self._answer(Reply((first_row, wanted.num_rows, wanted.file.table.length), payload, wanted.num_slots))


class _Batch:
    """The calls of a PRED_BATCH: answered together, when the last has ended."""

    def __init__(self, call: SystemCall, parts: list[Wanted | SymError]) -> None:
        num_bytes = sum(_part_bytes(part) for part in parts)
        if num_bytes > PAYLOAD_BYTES:
            raise TooLarge(f"the answer to this batch has {num_bytes} bytes, a message {PAYLOAD_BYTES}: use several")
        self._call = call
        self._outcomes: list[Reply | SymError | None] = [None if isinstance(part, Wanted) else part for part in parts]
        self._num_left = self._outcomes.count(None)

    def ended(self, index: int, outcome: Reply | SymError) -> None:
        self._outcomes[index] = outcome
        self._num_left -= 1
        if self._num_left == 0:
            self.answer()

    def answer(self) -> None:
        payload = b"".join(_frame(index, outcome) for index, outcome in enumerate(self._outcomes))
        num_rows = sum(outcome.num_rows for outcome in self._outcomes if isinstance(outcome, Reply))
        self._call.answer(Reply((len(self._outcomes),), payload, num_rows))


def _when_rows(call: SystemCall, num_slots: int, have_rows: Then) -> None:
    """Have `have_rows` told of so many result slots, or why there are none; until then the call can be cancelled."""
    if not num_slots:
        have_rows(_NO_SLOTS)
    elif (stop_waiting := call.lip.take_rows(num_slots, have_rows)) is not None:
        call.when_cancelled(stop_waiting)


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
    num_rows, num_columns = fields.unpack(MASK_STRUCT, "a mask")
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
        frame_bytes, op, zero, flags, zero2, call_id, handle, *args = fields.unpack(REQUEST_STRUCT, f"call {index}")
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
    header = REPLY_STRUCT.pack(HEADER_BYTES + len(payload), code, index, *(*args, 0, 0, 0, 0)[:4], 0, 0, 0)
    return header + payload + bytes(-len(payload) % FRAME_ALIGN)
