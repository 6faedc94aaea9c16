"""PRED and PRED_BATCH: check the arguments once, and give the calls to the batch scheduler.

The answer for a row is a result slot, or numbers (`Reduction`). A batch takes the slots of all its calls together. So
two batches cannot each hold half of their slots and wait for each other.

A call that waits for slots keeps its place in its file's queue. So a file sees its calls in the order in which they
were made. These waits cannot deadlock. When the daemon takes a request, the call enters its queue and asks for its
slots at the same moment. Queues are served in order, and so are the waits for slots of one connection. So a call waits
only for calls that were taken before it, and for its own program, which may hold all slots. The oldest waiting call
waits only for its program. The wait for the program is bounded: the call gets NoBuffers, and another call becomes the
oldest.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

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
from scheduler.batch.attention import AnswerRoom, AttentionMass, AttentionMemory, EntryMask
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import NO_SLOTS, PredCall
from scheduler.batch.reduction import Reduction
from scheduler.batch.states import CallState
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.appending import Limited, appendable
from scheduler.operations.operation import Operation, Table
from scheduler.wire.payloads import PayloadReader, check_priority, deadline_of
from scheduler.wire.replies import Reply, kept

MAX_ERROR_BYTES = 512
"""Maximum number of bytes of an error's message in a batch's reply. Many calls of a batch may fail."""
_NO_ARGS: tuple[int, ...] = ()
_ONE_TOKEN = ((1, 0, 0, 0), (1, 1, 0, 0))
"""Arguments of a call that appends one token, without and with its position."""


class Predicting:
    """Answers PRED and PRED_BATCH."""

    def __init__(self, batches: BatchScheduler, limits_of: Callable[[OpenKv], Limited]) -> None:
        """`limits_of` returns the checks by the limits of a file's model."""
        self._batches = batches
        self._limits_of = limits_of
        self._memory = AttentionMemory()

    def table(self) -> Table:
        return {Op.PRED: Operation(self.pred, is_of_its_file=True), Op.PRED_BATCH: Operation(self.pred_batch)}

    def pred(self, call: SystemCall) -> None:
        """Begin a PRED. A call for one token and its row may become a decode loop in the run."""
        request = call.request
        pred = self._parse(call.lip, request, call.answer)
        if request.flags == ROWS_LAST and request.args in _ONE_TOKEN:
            pred.loop(call)
        if pred.attention is not None:
            pred.attention.room = AnswerRoom(PAYLOAD_BYTES - pred.num_reduced_bytes)
        self._begin(call, [pred], pred.num_slots)

    def pred_batch(self, call: SystemCall) -> None:
        """Submit the requests in the payload. An invalid request fails alone. A payload that is no list of requests
        fails the batch.
        """
        frames, preds = _frames(call.request), list[PredCall]()
        batch = _Batch(call, len(frames))
        for index, frame in enumerate(frames):
            try:
                preds.append(self._parse(call.lip, frame, partial(batch.ended, index)))
            except SymError as error:
                batch.note(index, kept(error))
        batch.check_room(preds)
        if preds:
            self._begin(call, preds, sum(pred.num_slots for pred in preds), batch)
        else:
            batch.answer()

    def _begin(self, call: SystemCall, preds: Sequence[PredCall], num_slots: int, batch: _Batch | None = None) -> None:
        """Queue the calls of a request or of a batch immediately, even if they must wait for their slots."""
        slots = call.lip.slots
        first = slots.take_now(num_slots) if num_slots else NO_SLOTS
        if first is not None:
            for pred in preds:
                first = pred.take_slots(first)
        else:
            for pred in preds:
                pred.wait_for_slots()
        call.when_cancelled(partial(self._cancel, preds))
        if len(preds) == 1:
            self._batches.submit(preds[0])
        else:
            self._batches.submit_all(preds)
        if first is None:
            have_slots = partial(self._have_slots, preds, batch)
            slots.wait(num_slots, have_slots, lambda: any(pred.state is not CallState.OVER for pred in preds))

    def _have_slots(self, preds: Sequence[PredCall], batch: _Batch | None, found: int | SymError) -> None:
        if not isinstance(found, SymError):
            for pred in preds:
                found = pred.take_slots(found)
        elif batch is not None:
            batch.refuse(found)
        for pred in preds:
            if pred.state is CallState.OVER:
                continue
            if isinstance(found, SymError):
                self._batches.refuse(pred, found)
            else:
                self._batches.have_rows(pred)

    def _cancel(self, preds: Sequence[PredCall]) -> None:
        for pred in preds:
            self._batches.cancel(pred)

    def _parse(self, lip: Lip, request: Request, answer: Callable[[Reply | SymError], None]) -> PredCall:
        file = appendable(lip, request.handle)
        flags, (num_tokens, num_positions, deadline_us, priority) = request.flags, request.args
        fields, limited = PayloadReader(request.payload), self._limits_of(file)
        tokens, positions = limited.entries(fields, num_tokens, num_positions)
        num_rows = 1 if flags == ROWS_LAST else _num_rows(flags, num_tokens)
        pred = PredCall(lip, file, tokens, positions, num_rows, answer)
        if flags & MASKED:
            pred.mask = _mask(fields, num_tokens)
        if flags & ATTENTION:
            pred.attention = self._attention(lip, file, fields)
        if flags & REDUCED:
            pred.reduce_by(Reduction(fields.rest(), limited.vocab_size, num_rows, limited.token_texts))
        fields.end()
        if deadline_us or priority:
            pred.priority, pred.deadline_s = check_priority(priority), deadline_of(deadline_us)
        return pred

    def _attention(self, lip: Lip, file: OpenKv, fields: PayloadReader) -> AttentionMass:
        layers, _, heads, _ = self._batches.fs.volume.model_of(file.content).page_shape
        block = fields.take(ATTENTION_STRUCT.size, "what attention is wanted")
        return AttentionMass(block, layers, heads, self._memory, lip.uid)


class _Batch:
    """The calls of a PRED_BATCH. They are answered together when the last call has ended."""

    def __init__(self, call: SystemCall, num_calls: int) -> None:
        self._call = call
        self._outcomes: list[Reply | SymError | None] = [None] * num_calls
        self._num_left = num_calls
        self._refusal: SymError | None = None

    def check_room(self, preds: Sequence[PredCall]) -> None:
        """Raise TooLarge if the answers do not fit one message. Calls that ask for mass share the free bytes."""
        reduced = [pred.num_reduced_bytes for pred in preds] + [0] * (len(self._outcomes) - len(preds))
        num_bytes = sum(_part_bytes(each) for each in reduced)
        if num_bytes > PAYLOAD_BYTES:
            raise TooLarge(f"the answer to this batch has {num_bytes} bytes, a message {PAYLOAD_BYTES}: use several")
        room = AnswerRoom(PAYLOAD_BYTES - num_bytes)
        for pred in preds:
            if pred.attention is not None:
                pred.attention.room = room

    def refuse(self, error: SymError) -> None:
        """Note the error that ends the remaining calls, and so the whole batch."""
        self._refusal = error

    def note(self, index: int, outcome: Reply | SymError) -> None:
        self._outcomes[index] = outcome
        self._num_left -= 1

    def ended(self, index: int, outcome: Reply | SymError) -> None:
        self.note(index, outcome)
        if self._num_left == 0:
            self.answer()

    def answer(self) -> None:
        if self._refusal is not None:
            self._call.answer(self._refusal)
            return
        payload = b"".join(_frame(index, outcome) for index, outcome in enumerate(self._outcomes))
        num_rows = sum(outcome.num_rows for outcome in self._outcomes if isinstance(outcome, Reply))
        self._call.answer(Reply((len(self._outcomes),), payload, num_rows))


def _num_rows(flags: int, num_tokens: int) -> int:
    num_rows = {ROWS_NONE: 0, ROWS_LAST: 1, ROWS_ALL: num_tokens}.get(flags & (ROWS_NONE | ROWS_LAST | ROWS_ALL))
    if num_rows is None:
        raise Invalid("pred() wants no row, the last row or all rows")
    return num_rows


def _mask(fields: PayloadReader, num_tokens: int) -> EntryMask:
    """Read a `struct sym_mask` and its rows. The mask is checked against the file when the call begins."""
    num_rows, num_columns = fields.unpack(MASK_STRUCT, "a mask")
    if num_rows not in (1, num_tokens):
        raise Invalid(f"a mask of {num_rows} rows: one for all {num_tokens} new tokens, or one for each")
    row_bytes = -(-num_columns // 32) * 4
    packed = np.frombuffer(fields.take(num_rows * row_bytes, "the mask's rows"), np.uint8).reshape(num_rows, row_bytes)
    return EntryMask(packed, num_columns)


def _frames(batch: Request) -> list[Request]:
    """Return the requests in a batch's payload. Invalid: the payload does not match the announced sizes."""
    count, payload = batch.args[0], batch.payload
    if not 1 <= count <= MAX_BATCH:
        raise Invalid(f"a batch of {count} calls: 1 to {MAX_BATCH} are possible")
    fields = PayloadReader(payload)
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


def _part_bytes(reduced: int) -> int:
    """Return the most bytes that the answer to one call may take."""
    return HEADER_BYTES + -(-max(reduced, MAX_ERROR_BYTES) // FRAME_ALIGN) * FRAME_ALIGN


def _frame(index: int, outcome: Reply | SymError | None) -> bytes:
    """Return a call's reply in the format of the ring."""
    assert outcome is not None
    if isinstance(outcome, SymError):
        code, args, payload = outcome.errno or errno.EIO, _NO_ARGS, str(outcome).encode()[:MAX_ERROR_BYTES]
    else:
        code, args, payload = 0, outcome.args, outcome.payload
    header = REPLY_STRUCT.pack(HEADER_BYTES + len(payload), code, index, *(*args, 0, 0, 0, 0)[:4], 0, 0, 0)
    return header + payload + bytes(-len(payload) % FRAME_ALIGN)
