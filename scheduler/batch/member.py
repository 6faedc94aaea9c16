"""Members: files in the standing run, and the memory that C uses until a member has left."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from decoder.batch import IntArray
from libsym.channel.hot import address
from scheduler._loop import ffi, lib
from scheduler.batch.attention import AttentionMass
from scheduler.batch.call import FileCall, PredCall
from scheduler.batch.generation import GenerateCall
from scheduler.batch.scratch import Scratch
from scheduler.batch.views import ints


class Member:
    """File in the run, with the call that appends to it."""

    def __init__(self, call: FileCall, share: int, scratch: Scratch, connection: int, stay: Any = None) -> None:
        """Describe a call to the run. `stay`: the `sym_stay` of a call that is in the run already; else None."""
        self.call = call
        self.kind = call.run_kind
        """Kind of the member, a `sym_member_kind`, which does not change."""
        self.loop = call if isinstance(call, PredCall) and self.kind == lib.SYM_PROGRAM else None
        """First call of a program's loop; None for members of other kinds."""
        self.index = -1
        """Place in the run; below 0: the member has not joined yet, or has left."""
        self.entered_s = time.monotonic()
        self.cancelled_id: int | None = None
        """Id of the cancelled call of the program.

        The run may have answered this call since, and may compute a later call now.
        """
        self.is_low = False
        """Whether the run has asked for more room and has not received any yet."""
        self.counted = ffi.new("sym_news *")
        """Counters of the work that is committed and counted already, a `sym_news`."""
        self.log: IntArray = np.empty(0, np.int32)
        self.rows: list[memoryview[float]] = []
        """Scratch memory for rows that wait for a grammar's decision."""
        self._scratch = scratch
        self._keep: list[Any] = []
        self.record = self._describe(share, connection) if stay is None else self._take_over(stay)
        """Record for the run, a `sym_member`; after the member has left, its final state."""

    def _describe(self, share: int, connection: int) -> Any:
        call, reservation = self.call, self.call.reservation
        assert reservation is not None
        pages = reservation.frames()
        tokens = np.ascontiguousarray(call.tokens)
        positions = None if call.positions is None else np.ascontiguousarray(call.positions)
        copies = reservation.frame_copies()
        self._keep += [pages, tokens, positions, copies]
        deadline_ns = lib.SYM_NO_DEADLINE
        if call.deadline_s is not None:
            deadline_ns = min(deadline_ns, int(call.deadline_s * 1e9))
        member = ffi.new(
            "sym_member *",
            {
                "number": call.number,
                "since_ns": (now_ns := time.monotonic_ns()),
                "begun_ns": now_ns,
                "arrived_ns": (arrived_ns := int(call.submitted_s * 1e9)),
                "asked_ns": arrived_ns if call.joined_s is None else now_ns,
                "deadline_ns": deadline_ns,
                "share": share,
                "connection": connection,
                "stream": call.stream,
                "priority": call.priority,
                "program": call.caller.pid,
                "pages": ints(pages),
                "copies": ints(copies),
                "num_copies": copies.size // 3,
                "tokens": ints(tokens),
                "positions": ffi.NULL if positions is None else ints(positions),
                "position": reservation.position(reservation.start),
                "num_tokens": len(call.tokens),
                "first": reservation.start,
                "capacity": reservation.stop,
                "num_rows": call.num_rows,
                "max_rows": 0 if call.caller.program.num_tokens_left is None else reservation.num_entries,
            },
        )
        member.kind = self.kind
        if self.kind == lib.SYM_CALL:
            self._add_call(member)
            return member
        assert isinstance(call, PredCall | GenerateCall)
        self.log = np.empty(reservation.num_entries, np.int32)
        member.log = ints(self.log)
        memory = call.channel.memory  # kept alive, because the program may end while a step is under way
        member.server = ffi.cast("sym_server *", address(memory[0]))
        member.call_id = call.request_id
        self._keep.append(memory)
        if isinstance(call, PredCall):
            call.entered()
            member.decode.handle, member.decode.slot = call.handle, call.slot
            self._add_rows(member, call.rows)
        else:
            member.generation = call.generation
            if call.grammar is not None:
                self.rows = self._scratch.take(1 + call.generation.max_draft)
                self._add_rows(member, self.rows)
        return member

    def _take_over(self, stay: Any) -> Any:
        loop = self.loop
        assert loop is not None
        self.index, self.entered_s = stay.index, stay.member.begun_ns * 1e-9
        self.counted[0] = stay.counted
        num_entries = stay.member.capacity - stay.member.first
        self.log = np.frombuffer(ffi.buffer(stay.log, 4 * num_entries), np.int32)
        self._keep += [ffi.gc(stay, lib.sym_stay_free), loop.channel.memory]
        return ffi.new("sym_member *", stay.member)  # a copy, which outlives the stay

    def _add_call(self, member: Any) -> None:
        call = self.call
        asked = member.asked
        if call.mask is not None:
            packed = np.ascontiguousarray(call.mask.packed)
            self._keep.append(packed)
            asked.mask = ffi.cast("uint8_t *", packed.ctypes.data)
            asked.mask_rows, asked.mask_row_bytes = packed.shape
            asked.mask_columns = call.mask.num_columns
        if call.reduction is not None:
            answer = ffi.from_buffer(call.reduction.answer)
            self._keep.append(answer)
            asked.reducer = ffi.cast("sym_reducer *", call.reduction.reducer.address)
            asked.answer = answer
            asked.answer_row_bytes = call.reduction.reducer.row_bytes
        elif call.rows:
            self._add_rows(member, call.rows)
        if call.attention is not None:
            self._add_attention(asked, call.attention)

    def _add_attention(self, asked: Any, attention: AttentionMass) -> None:
        self._keep.append(attention)
        asked.mass.sums = ffi.cast("float *", attention.sums.ctypes.data)
        asked.mass.layers, asked.mass.kv_heads, asked.mass.columns = attention.sums.shape
        asked.is_mass_summed, asked.is_mass_by_page = attention.is_summed, attention.is_by_page
        if attention.folded is not None:
            asked.folded = ffi.cast("float *", attention.folded.ctypes.data)

    def _add_rows(self, member: Any, rows: Any) -> None:
        buffers = [ffi.from_buffer("float[]", row, require_writable=True) for row in rows]
        pointers = ffi.new("float *[]", buffers)
        self._keep += [buffers, pointers]
        member.rows = pointers

    @property
    def num_spare(self) -> int:
        """Number of reserved entries that were unused at the latest look at the member."""
        return len(self.log) - int(self.counted.num_done)

    def extend(self, loop: Any) -> None:
        """Tell the run that the reservation has grown."""
        reservation = self.call.reservation
        assert reservation is not None
        pages = reservation.frames()
        first = self.record.first
        log = np.empty(reservation.stop - first, np.int32)
        lib.sym_loop_extend(loop, self.index, ints(pages), ints(log), first + len(log))
        self.log = log
        self.is_low = False
        self._keep += [pages, log]

    def let_go(self) -> None:
        """Release the memory that C used, now and not when the garbage collector runs: see `kept`."""
        self._keep.clear()
        self.record = None
        if self.rows:
            self._scratch.give_back(self.rows)
            self.rows = []
