"""Calls that append to a KV file: their arguments, what they hold, and their state.

A call has one or more stretches. A *stretch* is the tokens that the call appends and commits together. A `pred()` has
one stretch. A `generate()` gets one from Python whenever it joins the run; the run itself makes the later stretches.
"""

from __future__ import annotations

import errno
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from kvfs.pages.table import Reservation
from kvfs.tiers.tickets import Ticket
from libsym.channel.server import Request, ServerChannel
from libsym.errors import SymError, TimedOut
from scheduler._loop import lib
from scheduler.batch.attention import AttentionMass, EntryMask
from scheduler.batch.reduction import Reduction
from scheduler.batch.states import MOVES, CallState, Early
from scheduler.programs.program import Program
from scheduler.programs.used import Used
from scheduler.trace.records import CallKind
from scheduler.wire.replies import Reply

AHEAD_ENTRIES = 64
"""Entries reserved beyond the end of the last page, for a file that the run extends by itself."""

NO_SLOTS = -1
"""Value of `PredCall.slot` for a call without result slots."""
Answer = Callable[[Reply | SymError], None]
_numbers = count(2, 2)
"""Serial numbers of calls in traces: even for calls that Python begins, odd for calls that C begins."""


class Caller(Protocol):
    """Origin of calls, with the facts that the scheduler needs: a LIP's connection, or the writer of a text."""

    @property
    def pid(self) -> int: ...

    @property
    def uid(self) -> int: ...

    @property
    def stream(self) -> int:
        """Stream of the call that the gate is handling: see libsym-abi(7)."""
        ...

    @property
    def program(self) -> Program:
        """Program that the calls count to."""
        ...


class CallingConnection(Caller, Protocol):
    """Caller with rings, and with result slots for the rows of its calls: a `Lip`."""

    @property
    def channel(self) -> ServerChannel: ...

    def file(self, handle: int) -> OpenKv:
        """Return the file of a handle that is open."""
        ...

    def free_rows(self, first: int, num_rows: int) -> None:
        """Give back the slots of a call that failed.

        `first` below 0: the call had no slots, and no longer waits for slots.
        """

    def wake(self) -> None:
        """Have the gate take requests out of the program's ring."""


class PendingCall(Protocol):
    """Request of a program that is under way: `SystemCall`."""

    @property
    def request(self) -> Request: ...

    def answer(self, outcome: Reply | SymError) -> None: ...

    def send(self, args: tuple[int, ...], payload: bytes = b"") -> None:
        """Send a reply that is not the last one."""
        ...

    def forget(self) -> None: ...

    def again(self, request_id: int) -> PendingCall:
        """Return a request like this one, with another id."""
        ...


class FileCall(ABC):
    """Call that appends to a file.

    The batch scheduler queues the call, reserves room, and puts the call into the run.
    """

    kind: CallKind

    def __init__(
        self,
        caller: Caller,
        file: OpenKv,
        tokens: IntArray,
        positions: IntArray | None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        self.number = next(_numbers)
        """Serial number of the call in traces."""
        self.caller = caller
        self.stream = caller.stream
        self.file = file
        self.priority = priority
        self.deadline_s = deadline_s
        """Deadline by `time.monotonic()`, which is CLOCK_MONOTONIC."""
        self.tokens = tokens
        """Tokens that this stretch appends."""
        self.positions = positions
        """Positions of the tokens. None: the positions continue from the last entry."""
        self.mask: EntryMask | None = None
        self.reduction: Reduction | None = None
        """Reduction of the rows to numbers; None: the program gets full rows."""
        self.attention: AttentionMass | None = None
        """Attention of the call's tokens; None: the call does not ask for it."""
        self.rows: tuple[memoryview[float], ...] = ()
        """Buffers of the wanted rows; empty: the run has memory for the rows."""
        self.reservation: Reservation | None = None
        """Reservation of the stretch's entries, and perhaps of entries for later stretches."""
        self.ticket: Ticket | None = None
        """Ticket of the pager, in the state WAITS_FOR_PAGES."""
        self._state = CallState.QUEUED
        self.early: Early | None = None
        """Reason why the call ends early."""
        self.num_appended = 0
        """Number of committed entries, summed over all stretches."""
        self.num_given = len(tokens)
        """Number of tokens that the program gave."""
        self.num_promised = 0
        """Number of the stretch's tokens that are not computed yet. The program's limit reserves them for this call."""
        self.refusal: SymError | None = None
        """Error for the call if its program is over a limit."""
        self.counted: tuple[Used, ...] = ()
        """Usages that the call counts to; empty until the first count."""
        self.submitted_s = time.monotonic()
        self.compute_s = 0.0
        """Time of all steps that computed parts of the call, summed."""
        self.queue_s = 0.0
        """Time that the call waited for steps in the run."""
        self.joined_s: float | None = None
        """Time at which the call first joined the run."""

    @property
    def state(self) -> CallState:
        return self._state

    def move(self, state: CallState) -> None:
        """Go to the next state. AssertionError: `MOVES` does not have this move."""
        assert state in MOVES[self._state], f"call {self.number} ({self.kind.word}): {self._state} -> {state}"
        self._state = state

    def wait_for_slots(self) -> None:
        """Let the call wait for result slots. Meanwhile the call keeps its place in its file's queue."""
        self._state = CallState.WAITS_FOR_SLOTS

    def enter(self, submitted_s: float) -> None:
        """Note that the core began the call: the call has room, and is in the run."""
        self.submitted_s = self.joined_s = submitted_s
        self.reservation, self._state = self.file.table.reservation, CallState.RUNNING

    def end_early(self, why: Early) -> None:
        """Note why the call ends early. The first reason stays, unless the program has gone."""
        if self.early is None or why is Early.GONE:
            self.early = why

    @property
    def waited_s(self) -> float:
        """Time that the call has waited: before it joined the run, and for steps in the run."""
        joined_s = time.monotonic() if self.joined_s is None else self.joined_s
        return joined_s - self.submitted_s + self.queue_s

    @property
    def num_ahead(self) -> int | None:
        """Entries to reserve beyond the file's last page. None: the rest of that page is not reserved either."""
        return None

    @property
    def run_kind(self) -> int:
        """Kind of the call's member in the run, a `sym_member_kind`."""
        return int(lib.SYM_CALL)

    @property
    def num_rows(self) -> int:
        """Number of rows that the program wants of a stretch: 0, 1 for the last row, or all rows."""
        return 0

    @property
    def num_rejected(self) -> int:
        """Entries that were computed and rejected, because the drawn tokens differ from the draft."""
        return 0

    def begin(self, reservation: Reservation, max_positions: int) -> None:
        """Begin a stretch, whose room is reserved. Invalid: the call's mask does not fit the file."""
        del max_positions
        self.reservation = reservation
        if self.mask is not None:
            self.mask.check(reservation.start, len(self.tokens))
        if self.attention is not None:
            self.attention.begin(reservation.start + len(self.tokens))

    def promise(self, num_tokens: int) -> None:
        """Set the number of tokens still to be computed.

        Other calls of the program may not use this part of the program's limit.
        """
        self.caller.program.num_promised += num_tokens - self.num_promised
        self.num_promised = num_tokens

    @property
    def num_answered(self) -> int:
        """Number of tokens or rows that the program has received, if the call did not fail."""
        return self.num_rows

    def cancellation(self) -> SymError | None:
        """Error with which the call ends if it ends early."""
        if self.early is Early.LATE:
            return TimedOut("the deadline has passed; nothing was appended")
        return SymError("the call was cancelled; nothing was appended", errno.ECANCELED)

    @abstractmethod
    def end(self, error: SymError | None) -> None:
        """Answer the call. Called once, on the trio thread, unless its program has gone."""

    def let_go(self) -> None:
        """Release the reservation and the program's memory now: other objects may refer to the call for longer."""
        self.reservation = None
        self.promise(0)
        if self.attention is not None:
            self.attention.let_go()


class PredCall(FileCall):
    """Call of `pred()` with checked arguments. The call holds its slots and memory until its answer."""

    kind = CallKind.PREDICTION
    caller: CallingConnection
    channel: ServerChannel
    num_rows = request_id = handle = 0

    def __init__(
        self,
        caller: CallingConnection,
        file: OpenKv,
        tokens: IntArray,
        positions: IntArray | None,
        num_rows: int,
        answer: Answer,
    ) -> None:
        """Make a call that is not submitted yet. `num_rows`: 0, 1 for the row of the last token, or the number of
        tokens for all rows.

        `answer` is called once, on the trio thread.
        """
        super().__init__(caller, file, tokens, positions)
        self.num_rows = self.num_slots = num_rows
        """Number of wanted result slots: as many as rows, or none with `reduction`."""
        self.slot = NO_SLOTS
        """Index of the call's first result slot."""
        self.asked: PendingCall | None = None
        """Request of the call, if the run may take the calls that follow it; else None."""
        self._answer = answer

    def loop(self, asked: PendingCall) -> None:
        """Let the run take the calls after this one out of the ring. This call has one token and wants its row."""
        self.asked, self.channel = asked, self.caller.channel
        self.request_id, self.handle = asked.request.id, asked.request.handle

    def wait_for_slots(self) -> None:
        super().wait_for_slots()
        self.asked = None  # the run can't take over a call that has no row yet

    @property
    def num_reduced_bytes(self) -> int:
        return 0 if self.reduction is None else self.reduction.num_bytes

    def take_slots(self, first: int) -> int:
        """Take result slots from `first` on, and return the index of the next slot.

        A call that is over frees its slots.
        """
        end = first + self.num_slots
        if end > first:
            self.slot = first
            self.rows = tuple(map(self.caller.channel.row, range(first, end)))
        if self._state is CallState.OVER:
            self.let_go()
        return end

    @property
    def num_ahead(self) -> int | None:
        """Entries to reserve ahead for a loop: only the rest of the page, because most branches are closed soon."""
        return None if self.run_kind == lib.SYM_CALL else 0

    def begin(self, reservation: Reservation, max_positions: int) -> None:
        super().begin(reservation, max_positions)
        if self.num_rows:  # a call without rows only writes: its tokens may be the last of a turn
            self.file.content.goes_on(None)

    def end(self, error: SymError | None) -> None:
        reduction = self.reduction
        if error is None and reduction is not None:
            error = reduction.error
        if error is not None:
            self._answer(error)
            return
        payload = b"" if reduction is None else bytes(reduction.answer)
        if self.attention is not None:
            payload += self.attention.answer()
        self._answer(Reply((self.slot, self.num_rows, self.file.table.length), payload, self.num_slots))

    def let_go(self) -> None:
        """Release memory and result slots. If the call has appended, the program has the slots, with the answer."""
        super().let_go()
        self.rows, self.mask = (), None
        if not self.num_appended:
            self.caller.free_rows(self.slot, self.num_slots)
            self.slot = NO_SLOTS

    # ---- a decode loop, which goes on without the scheduler: see `loop.c`

    @property
    def run_kind(self) -> int:
        return int(lib.SYM_CALL if self.asked is None else lib.SYM_PROGRAM)

    def entered(self) -> None:
        """Note that the run has the call and answers it. From now on `BatchScheduler.cancel_taken` cancels it."""
        assert self.asked is not None
        self.asked.forget()

    def again(self, request_id: int, slot: int, token: int, answer: Answer | None) -> PredCall:
        """Make an ordinary call from a call that the run took and did not compute.

        `answer` answers a call of a batch; None: the call is answered alone.
        """
        assert self.asked is not None
        asked = self.asked.again(request_id)
        call = PredCall(self.caller, self.file, np.array([token], np.int32), None, 1, answer or asked.answer)
        if answer is None:
            call.loop(asked)
        if slot == NO_SLOTS:
            call.num_slots = 0
        call.take_slots(slot)
        return call

    def reduce_by(self, reduction: Reduction) -> None:
        """Answer the call with numbers. Its row needs no slot, and the run does not take the calls that follow."""
        self.reduction, self.num_slots, self.asked = reduction, 0, None

    def answer_by(self, answer: Answer) -> None:
        """Answer the call as a part of its batch."""
        self._answer = answer


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of a grammar about the next draw of its generation."""

    forced: IntArray
    """Tokens that the grammar forces before the draw."""
    allowed: memoryview | None
    """Bits of the tokens that may be drawn."""
    is_over: bool
    """Whether the text ends after the forced tokens."""


THE_END = Decision(np.empty(0, np.int32), None, is_over=True)
