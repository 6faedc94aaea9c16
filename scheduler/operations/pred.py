"""PRED and PRED_BATCH: what they ask for, checked once, and made into work for the batch scheduler.

A row is answered by a result slot, or by numbers (`Reduction`). A batch takes the slots of all its calls at once, so
that no two batches wait for each other with half of theirs.

A call that has to wait for slots has its place in its file's queue meanwhile, so that files see the calls in the order
in which they were made. This can't come to a deadlock. Places in queues are taken, and slots are asked for, in the
moment when a request is taken; queues are served in order, and so are the waits for slots of one connection. So a call
waits for calls that were taken before it, and for its own program, which may hold all slots. The oldest of those that
wait has nothing but its program to wait for, and that wait is bounded: it gets NoBuffers, and another is the oldest.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from libsym.abi import (
    ATTENTION,
    ATTENTION_STRUCT,
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
from libsym.errors import Invalid, SymError, TooLarge
from scheduler.batch.attention import AnswerRoom, AttentionMass, AttentionMemory
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import EntryMask, PredCall
from scheduler.batch.reduction import Reduction
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.appending import Limited, appendable
from scheduler.operations.decode_call import decode_call
from scheduler.operations.operation import Operation, Table
from scheduler.payloads import Fields, check_priority, deadline_of
from scheduler.replies import Reply, kept

MAX_ERROR_BYTES = 512
"""Of a message in a batch's reply: that many calls may fail at once."""
_NO_SLOTS = -1
_NO_ARGS: tuple[int, ...] = ()
_ONE_TOKEN = ((1, 0, 0, 0), (1, 1, 0, 0))
"""Arguments of a call that goes on by one token, without and with its position."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Arguments of one PRED, checked."""

    handle: int
    file: OpenKv
    tokens: IntArray
    positions: IntArray | None
    num_rows: int
    mask: EntryMask | None
    reduction: Reduction | None
    attention: AttentionMass | None
    priority: int
    deadline_s: float | None

    @property
    def num_slots(self) -> int:
        return 0 if self.reduction is not None else self.num_rows

    @property
    def num_reduced_bytes(self) -> int:
        return 0 if self.reduction is None else self.reduction.num_bytes


class Predicting:
    """Answers PRED and PRED_BATCH."""

    def __init__(self, batches: BatchScheduler, limited: Limited) -> None:
        self._batches = batches
        self._limited = limited
        self._memory = AttentionMemory()

    def table(self) -> Table:
        return {Op.PRED: Operation(self.pred, is_of_its_file=True), Op.PRED_BATCH: Operation(self.pred_batch)}

    def pred(self, call: SystemCall) -> None:
        """Begin a PRED. A call for one token and its row may go on by itself, in the run: the short way."""
        if call.request.flags == ROWS_LAST and call.request.args in _ONE_TOKEN and self._decode(call):
            return
        wanted = self._parse(call.lip, call.request)
        if wanted.attention is not None:
            wanted.attention.room = AnswerRoom(PAYLOAD_BYTES - wanted.num_reduced_bytes)
        self._begin(call, [_Appending(call.lip, wanted, call.answer)])

    def _decode(self, call: SystemCall) -> bool:
        """False: it has to wait for its slot."""
        lip, request = call.lip, call.request
        file = appendable(lip, request.handle)
        fields = Fields(request.payload)
        tokens, positions = self._limited.entries(fields, 1, request.args[1])
        fields.end()
        slot = lip.slots.take_now(1)
        if slot is None:
            return False
        self._submit(call, [decode_call(call, file, slot, tokens, positions)])
        return True

    def _begin(self, call: SystemCall, parts: Sequence[_Appending], batch: _Batch | None = None) -> None:
        """Queue the calls of a request, or of a batch: now, with their slots or without."""
        slots, num_slots = call.lip.slots, sum(part.wanted.num_slots for part in parts)
        first_row = slots.take_now(num_slots) if num_slots else _NO_SLOTS
        preds = [part.call() for part in parts]
        if first_row is not None:
            _hand_out(first_row, parts, preds)
            self._submit(call, preds)
            return

        def have_rows(found: int | SymError) -> None:
            if not isinstance(found, SymError):
                _hand_out(found, parts, preds)
            elif batch is not None:
                batch.refuse(found)
            for part, pred in zip(parts, preds, strict=True):
                if part.is_over:
                    continue
                if isinstance(found, SymError):
                    self._batches.refuse(pred, found)
                else:
                    self._batches.have_rows(pred)

        for pred in preds:
            pred.wait_for_slots()
        self._submit(call, preds)
        slots.wait(num_slots, have_rows, lambda: not all(part.is_over for part in parts))

    def _submit(self, call: SystemCall, preds: Sequence[PredCall]) -> None:
        def cancel() -> None:
            for pred in preds:
                self._batches.cancel(pred)

        call.when_cancelled(cancel)
        if len(preds) == 1:
            self._batches.submit(preds[0])
        else:
            self._batches.submit_all(preds)

    def pred_batch(self, call: SystemCall) -> None:
        """The payload is whole requests; each that is no good fails alone, but a frame that is none fails them all."""
        parts = [self._part(call.lip, each) for each in _frames(call.request)]
        batch = _Batch(call, parts)
        appending = [
            _Appending(call.lip, part, partial(batch.ended, index))
            for index, part in enumerate(parts)
            if isinstance(part, Wanted)
        ]
        if appending:
            self._begin(call, appending, batch)
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
        attention = self._attention(lip, fields) if request.flags & ATTENTION else None
        reduction = None
        if request.flags & REDUCED:
            limited = self._limited
            reduction = Reduction(fields.rest(), limited.vocab_size, num_rows, limited.token_texts)
        fields.end()
        priority, deadline_s = check_priority(priority), deadline_of(deadline_us)
        return Wanted(
            request.handle, file, tokens, positions, num_rows, mask, reduction, attention, priority, deadline_s
        )

    def _attention(self, lip: Lip, fields: Fields) -> AttentionMass:
        layers, _, heads, _ = self._batches.fs.volume.model.page_shape
        block = fields.take(ATTENTION_STRUCT.size, "what attention is wanted")
        return AttentionMass(block, layers, heads, self._memory, lip.uid)


class _Appending:
    """A PRED between the parsing and its answer.

    It is what the queued call refers to, and refers to no call: so what the program sent is freed with the answer, or
    when the program has gone, and not only when the collector comes by.
    """

    __slots__ = ("_answer", "_first_row", "_lip", "is_over", "wanted")

    def __init__(self, lip: Lip, wanted: Wanted, answer: Callable[[Reply | SymError], None]) -> None:
        self._lip = lip
        self.wanted = wanted
        self._answer = answer
        self._first_row = _NO_SLOTS
        self.is_over = False

    def call(self) -> PredCall:
        """To be queued, without rows yet."""
        wanted = self.wanted
        return PredCall(
            self._lip,
            wanted.file,
            wanted.tokens,
            wanted.positions,
            (),
            self._end,
            priority=wanted.priority,
            deadline_s=wanted.deadline_s,
            mask=wanted.mask,
            num_rows=wanted.num_rows,
            reduction=wanted.reduction,
            attention=wanted.attention,
        )

    def take(self, first_row: int) -> tuple[memoryview[float], ...]:
        """Take the result slots, which are the PRED's own from here on, and return their rows."""
        if self.is_over:
            self._lip.free_rows(first_row, self.wanted.num_slots)
            return ()
        self._first_row = first_row
        return tuple(self._lip.channel.row(first_row + index) for index in range(self.wanted.num_slots))

    def _end(self, error: SymError | None) -> None:
        wanted, self.is_over = self.wanted, True
        if error is not None:
            if self._first_row != _NO_SLOTS:
                self._lip.free_rows(self._first_row, wanted.num_slots)
            self._answer(error)
            self._lip.slots.serve()  # it may have been waiting for some, before others
            return
        if wanted.reduction is not None and wanted.reduction.error is not None:
            self._answer(wanted.reduction.error)
            return
        payload = b"" if wanted.reduction is None else bytes(wanted.reduction.answer)
        if wanted.attention is not None:
            payload += wanted.attention.answer()
        first_row = self._first_row if wanted.num_slots else _NO_SLOTS
        self._answer(Reply((first_row, wanted.num_rows, wanted.file.table.length), payload, wanted.num_slots))


class _Batch:
    """The calls of a PRED_BATCH: answered together, when the last has ended."""

    def __init__(self, call: SystemCall, parts: list[Wanted | SymError]) -> None:
        num_bytes = sum(_part_bytes(part) for part in parts)
        if num_bytes > PAYLOAD_BYTES:
            raise TooLarge(f"the answer to this batch has {num_bytes} bytes, a message {PAYLOAD_BYTES}: use several")
        room = AnswerRoom(PAYLOAD_BYTES - num_bytes)
        for part in parts:
            if isinstance(part, Wanted) and part.attention is not None:
                part.attention.room = room
        self._call = call
        self._outcomes: list[Reply | SymError | None] = [None if isinstance(part, Wanted) else part for part in parts]
        self._num_left = self._outcomes.count(None)
        self._refusal: SymError | None = None

    def refuse(self, error: SymError) -> None:
        """Note the error that ends the calls that are left, and so the whole batch."""
        self._refusal = error

    def ended(self, index: int, outcome: Reply | SymError) -> None:
        self._outcomes[index] = outcome
        self._num_left -= 1
        if self._num_left == 0:
            self.answer()

    def answer(self) -> None:
        if self._refusal is not None:
            self._call.answer(self._refusal)
            return
        payload = b"".join(_frame(index, outcome) for index, outcome in enumerate(self._outcomes))
        num_rows = sum(outcome.num_rows for outcome in self._outcomes if isinstance(outcome, Reply))
        self._call.answer(Reply((len(self._outcomes),), payload, num_rows))


def _hand_out(first_row: int, parts: Sequence[_Appending], preds: Sequence[PredCall]) -> None:
    """Result slots for the calls of a request, one after the other."""
    for part, pred in zip(parts, preds, strict=True):
        if part.wanted.num_slots:
            pred.rows = part.take(first_row)
            first_row += part.wanted.num_slots


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
    reduced = part.num_reduced_bytes if isinstance(part, Wanted) else 0
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
