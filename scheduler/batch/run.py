"""A run: steps that follow each other in C (`loop.c`), and what the scheduler sees of them meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decoder.batch import IntArray, NativeStep
from kvfs.pages.store import PageStore
from libsym.channel.hot import HOT_FUNCTIONS, address
from libsym.errors import SymError
from libsym.rows.native import checked
from scheduler._loop import ffi, lib
from scheduler.batch.call import FileCall, HotGeneration, HotPred, Rows
from scheduler.replies import kept

WAIT_PERCENT = 10
"""Share of a step's time that the next one may wait for programs that usually come back so soon."""
WAIT_MIN_NS = 300_000
"""A program in Python needs some 0.2 ms after a step that has pushed its code out of the caches."""
WAIT_MAX_NS = 3_000_000

MAX_MEMBERS: int = lib.SYM_MAX_MEMBERS

COMPUTING, WAITING, ENDED = lib.SYM_COMPUTING, lib.SYM_WAITING, lib.SYM_ENDED


@dataclass(slots=True)
class Counts:
    """What the steps of a run did since they were last counted; times in seconds."""

    num_steps: int
    step_s: float
    last_step_s: float
    num_taken: int
    """Calls that came out of the programs' rings without the gate."""


class Member:
    """One file of a run."""

    def __init__(self, index: int, call: FileCall, member: Any) -> None:
        self.index = index
        self.call = call
        self.num_committed = 0
        self.num_counted = 0
        """Calls of its program that are counted already."""
        self.num_counted_entries = 0
        self.compute_s = 0.0
        """Time that is counted already."""
        self._member = member
        self._keep: list[Any] = []

    def fill(self, row: memoryview[float]) -> None:
        """Say what the loop needs to know; `row` is where logits go that no program waits for."""
        call, member, reservation = self.call, self._member, self.call.reservation
        assert reservation is not None
        hot = call.hot
        assert hot is not None
        pages = np.array(reservation.frames(len(reservation.pages)), np.int32)
        self.log: IntArray = np.empty(len(reservation.tokens), np.int32)
        member.pages = ffi.cast("int32_t *", pages.ctypes.data)
        member.log = ffi.cast("int32_t *", self.log.ctypes.data)
        memory = hot.channel.memory  # kept: the program may go while the run is under way
        member.server = ffi.cast("sym_server *", address(memory[0]))
        member.call_id = hot.request_id
        member.token = int(call.tokens[0])
        member.position = int(reservation.positions[0])
        member.first = reservation.start
        member.capacity = reservation.start + len(reservation.tokens)
        self._keep += [pages, self.log, hot, memory]
        if isinstance(hot, HotGeneration):
            self._fill_generation(hot)
        else:
            hot.entered()
            row = call.slots(0, 1)[0]
            member.handle = hot.handle
            member.slot = hot.slot
            member.is_quick = 1
        buffer = ffi.from_buffer("float[]", row, require_writable=True)
        member.row = buffer
        self._keep.append(buffer)

    def _fill_generation(self, hot: HotGeneration) -> None:
        member = self._member
        stop_tokens = np.array(sorted(hot.stop_tokens), np.int32)
        member.sampler = ffi.cast("sym_sampler *", hot.sampler.address)
        member.draw_index = hot.draw_index
        member.stop_tokens = ffi.cast("int32_t *", stop_tokens.ctypes.data)
        member.num_stop_tokens = len(stop_tokens)
        member.num_to_emit = hot.num_to_emit
        self._keep.append(stop_tokens)

    def let_go(self) -> None:
        """The run is over: what C had is given back here and now. See `kept` for what would come of it in garbage."""
        self._keep.clear()

    @property
    def hot(self) -> HotPred | None:
        """Of a program's calls; None: its tokens are drawn."""
        found = self.call.hot
        return found if isinstance(found, HotPred) else None

    @property
    def num_done(self) -> int:
        return int(lib.sym_member_num_done(ffi.addressof(self._member)))

    def draw_failure(self) -> SymError:
        """Why no token could be drawn."""
        try:
            checked(-self.draw_error)
        except SymError as failure:
            return kept(failure)
        except MemoryError as failure:
            return kept(SymError(str(failure), errno.ENOMEM))
        raise AssertionError("a token was drawn")

    def __getattr__(self, name: str) -> Any:
        """`state`, `end`, `token`, `call_id`, `slot` and so on, as loop.h has them: final when the run is over."""
        return getattr(self._member, name)


class Run:
    """One run over calls that are hot, each with one token to compute and whatever room its reservation has."""

    def __init__(self, native: NativeStep, calls: Sequence[FileCall], scratch: Rows, wake_fd: int) -> None:
        """`wake_fd`: an eventfd that is rung when the programs' rings hold something for the gate."""
        copies: list[tuple[int, int]] = []
        self._stale: list[int] = []
        for call in calls:
            assert call.reservation is not None
            self._stale += call.reservation.pages_to_zero(len(call.reservation.tokens))
            copies += call.reservation.frame_copies()
        self._array = ffi.new("sym_member[]", len(calls))
        self.members = [Member(index, call, self._array[index]) for index, call in enumerate(calls)]
        for member, row in zip(self.members, scratch, strict=True):
            member.fill(row)
        self._by_table = {member.call.file.table: member for member in self.members}
        self._copies = np.array(copies, np.int32).reshape(-1)
        loop = lib.sym_run_new(
            ffi.cast("sym_hot_functions *", HOT_FUNCTIONS),
            ffi.cast("sym_step_function *", native.function),
            ffi.cast("sym_decoder *", native.decoder),
            self._array,
            len(calls),
            ffi.cast("int32_t *", self._copies.ctypes.data),
            len(copies),
            (WAIT_PERCENT, WAIT_MIN_NS, WAIT_MAX_NS),
            wake_fd,
        )
        if loop == ffi.NULL:
            raise MemoryError("no memory for a loop over steps")
        self._loop = ffi.gc(loop, lib.sym_run_free)
        self._counted_steps = 0
        self._counted_ns = 0
        self._counted_taken = 0

    def execute(self, pages: PageStore) -> None:
        """In the step's thread: run steps until the scheduler has to decide something."""
        for page in self._stale:
            pages.zero(page)
        error = lib.sym_run_execute(self._loop)
        if error:
            raise OSError(error, f"a step of {len(self.members)} calls failed: {os.strerror(error)}")

    def stop(self) -> None:
        """End after the step under way."""
        lib.sym_run_stop(self._loop)

    def wake_programs(self) -> None:
        """Let the gate look at what has come."""
        for member in self.members:
            if member.hot is not None:
                member.hot.wake()

    def holds(self, table: object) -> bool:
        return table in self._by_table

    def take(self, call: FileCall) -> bool:
        """Whether a member waits for this call, which came by the gate: then it is the run's now."""
        hot = call.hot
        member = self._by_table.get(call.file.table)
        if member is None or not isinstance(hot, HotPred) or member.hot is None:
            return False
        if member.hot.channel is not hot.channel or member.hot.handle != hot.handle:
            return False
        found = ffi.new("sym_hot_call *")
        found.id, found.slot, found.token = hot.request_id, hot.slot, int(call.tokens[0])
        found.row = ffi.from_buffer("float[]", call.slots(0, 1)[0], require_writable=True)
        position = -1 if call.positions is None else int(call.positions[0])
        taken = bool(lib.sym_run_inject(self._loop, member.index, found, position))
        if taken:
            hot.entered()
        return taken

    @property
    def progress(self) -> int:
        """Entries computed so far, of all members."""
        return int(lib.sym_run_progress(self._loop))

    def count(self) -> Counts:
        """The steps since the last count."""
        num_taken = lib.sym_run_num_taken(self._loop)
        num_steps, step_ns = lib.sym_run_num_steps(self._loop), lib.sym_run_step_ns(self._loop)
        counts = Counts(
            num_steps - self._counted_steps,
            (step_ns - self._counted_ns) * 1e-9,
            lib.sym_run_last_step_ns(self._loop) * 1e-9,
            num_taken - self._counted_taken,
        )
        self._counted_steps, self._counted_ns, self._counted_taken = num_steps, step_ns, num_taken
        return counts

    def steps_of(self, num_calls: int) -> int:
        """Steps that held so many calls."""
        return int(lib.sym_run_steps_of(self._loop, num_calls))
