"""Calls that append to a KV file, from their place in its queue to their answer.

A call lives through one stretch or several. A *stretch* is what it appends at once, and commits together. A `pred()`
has one; a `generate()` begins one whenever it joins the run, and goes on by itself there.
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
from scheduler.replies import Reply
from scheduler.trace.records import CallKind

AHEAD_ENTRIES = 64
"""Entries reserved beyond the next for a file that goes on by itself, beside the rest of its page."""

NO_SLOTS = -1
"""First of no result slots."""
_numbers = count(2, 2)
"""Of calls. Odd ones are the core's."""


class Caller(Protocol):
    """Connection of a LIP, as far as the scheduler knows it."""

    @property
    def pid(self) -> int: ...

    @property
    def uid(self) -> int: ...

    @property
    def stream(self) -> int:
        """Stream of the call that is handled now: see libsym-abi(7)."""
        ...

    @property
    def program(self) -> Program:
        """Program that the calls count to."""
        ...


class Connection(Caller, Protocol):
    """Caller that has rings, and result slots for the rows of its calls: `Lip`."""

    @property
    def channel(self) -> ServerChannel: ...

    def file(self, handle: int) -> OpenKv:
        """Return the file of a handle that is open."""
        ...

    def free_rows(self, first: int, num_rows: int) -> None:
        """Give back the slots of a call that failed; below 0: it had none, and waits for them no more."""

    def wake(self) -> None:
        """Have the gate look at the program's ring."""


class Asked(Protocol):
    """Request of a program that is under way: `SystemCall`."""

    @property
    def request(self) -> Request: ...

    def answer(self, outcome: Reply | SymError) -> None: ...

    def send(self, args: tuple[int, ...], payload: bytes = b"") -> None:
        """Send a reply that others follow."""
        ...

    def forget(self) -> None: ...

    def again(self, request_id: int) -> Asked:
        """Return a later request of the same form."""
        ...


class FileCall(ABC):
    """Call that the batch scheduler queues, reserves room for, has computed, and commits."""

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
        """For traces."""
        self.caller = caller
        self.stream = caller.stream
        self.file = file
        self.priority = priority
        self.deadline_s = deadline_s
        """In the time of `time.monotonic()`: CLOCK_MONOTONIC."""
        self.tokens = tokens
        """Tokens that this stretch appends."""
        self.positions = positions
        """None: they go on after the last entry's."""
        self.mask: EntryMask | None = None
        self.reduction: Reduction | None = None
        """Reduction that rows are answered by."""
        self.attention: AttentionMass | None = None
        """Attention of its tokens, if it asks for that."""
        self.rows: tuple[memoryview[float], ...] = ()
        """Where the rows go that are wanted; none: into memory of the run."""
        self.reservation: Reservation | None = None
        """Of the stretch's entries, and maybe of some more, which the next stretches will take."""
        self.ticket: Ticket | None = None
        """Handle on the wait for pages, in the state of that name."""
        self._state = CallState.QUEUED
        self.early: Early | None = None
        """Why it ends early, or is to."""
        self.num_appended = 0
        """Entries committed, of all stretches."""
        self.num_given = len(tokens)
        """Tokens that its program gave."""
        self.num_promised = 0
        """Tokens of its stretch that are not computed yet: its program's limit has room for them."""
        self.refusal: SymError | None = None
        """The limit that its program is over."""
        self.counted: tuple[Used, ...] = ()
        """Usages that the call counts to, once something of it was counted."""
        self.submitted_s = time.monotonic()
        self.compute_s = 0.0
        """Time of the steps that held some of it."""
        self.queue_s = 0.0
        """Time that it waited in the run for steps."""
        self.joined_s: float | None = None
        """When it came into the run first."""

    @property
    def state(self) -> CallState:
        return self._state

    def move(self, state: CallState) -> None:
        """Take the next state. AssertionError: `MOVES` has no such move."""
        assert state in MOVES[self._state], f"call {self.number} ({self.kind.word}): {self._state} -> {state}"
        self._state = state

    def wait_for_slots(self) -> None:
        """Begin without result slots: the call has its place in its file's queue meanwhile."""
        self._state = CallState.WAITS_FOR_SLOTS

    def enter(self, submitted_s: float) -> None:
        """The core began the call, and it is in the run already, with its room."""
        self.submitted_s = self.joined_s = submitted_s
        self.reservation, self._state = self.file.table.reservation, CallState.RUNNING

    def end_early(self, why: Early) -> None:
        """Note why the call ends before its time. The first reason stays, unless there is nobody left to tell it."""
        if self.early is None or why is Early.GONE:
            self.early = why

    @property
    def waited_s(self) -> float:
        """Time that it waited: for its place in the run, and there for steps."""
        joined_s = time.monotonic() if self.joined_s is None else self.joined_s
        return joined_s - self.submitted_s + self.queue_s

    @property
    def num_ahead(self) -> int | None:
        """Entries to reserve behind the rest of the file's last page; None: not even those of that page."""
        return None

    @property
    def run_kind(self) -> int:
        """Kind of member that it is in the run, a `sym_member_kind`."""
        return int(lib.SYM_CALL)

    @property
    def num_rows(self) -> int:
        """Rows of its stretch that are wanted: none, the last, or all."""
        return 0

    @property
    def num_rejected(self) -> int:
        """Entries that were computed and do not count, for what was drawn is not the draft."""
        return 0

    def begin(self, reservation: Reservation, max_positions: int) -> None:
        """There is room for a stretch. Invalid: what it asks for does not fit the file."""
        del max_positions
        self.reservation = reservation
        if self.mask is not None:
            self.mask.check(reservation.start, len(self.tokens))
        if self.attention is not None:
            self.attention.begin(reservation.start + len(self.tokens))

    def promise(self, num_tokens: int) -> None:
        """Keep tokens to be computed from now on: no other call of its program may have them."""
        self.caller.program.num_promised += num_tokens - self.num_promised
        self.num_promised = num_tokens

    @property
    def num_answered(self) -> int:
        """Tokens or rows that its program has got of it, if it did not fail."""
        return self.num_rows

    def cancellation(self) -> SymError | None:
        """Error that a call ended early ends with."""
        if self.early is Early.LATE:
            return TimedOut("the deadline has passed; nothing was appended")
        return SymError("the call was cancelled; nothing was appended", errno.ECANCELED)

    @abstractmethod
    def end(self, error: SymError | None) -> None:
        """End the call. Called once, on the trio thread, unless its program has gone."""

    def let_go(self) -> None:
        """Give up pages and the program's memory, whoever still refers to the call."""
        self.reservation = None
        self.promise(0)
        if self.attention is not None:
            self.attention.let_go()


class PredCall(FileCall):
    """A `pred()`: arguments, checked, and all that the call holds up to its answer."""

    kind = CallKind.PREDICTION
    caller: Connection
    channel: ServerChannel
    num_rows = request_id = handle = 0

    def __init__(
        self,
        caller: Connection,
        file: OpenKv,
        tokens: IntArray,
        positions: IntArray | None,
        num_rows: int,
        answer: Callable[[Reply | SymError], None],
    ) -> None:
        """`num_rows`: none, the last token's, or one for each. `answer` is called once, on the trio thread."""
        super().__init__(caller, file, tokens, positions)
        self.num_rows = self.num_slots = num_rows
        """With `reduction` no rows have slots."""
        self.slot = NO_SLOTS
        """First of its result slots."""
        self.asked: Asked | None = None
        """Request of a decode loop."""
        self._answer = answer

    def loop(self, asked: Asked) -> None:
        """Let the run take calls that follow out of the ring: this one is for one token and its row."""
        self.asked, self.channel = asked, self.caller.channel
        self.request_id, self.handle = asked.request.id, asked.request.handle

    def wait_for_slots(self) -> None:
        super().wait_for_slots()
        self.asked = None  # the run takes no call without its row

    @property
    def num_reduced_bytes(self) -> int:
        return 0 if self.reduction is None else self.reduction.num_bytes

    def take_slots(self, first: int) -> int:
        """Have result slots, up to the answer; return the slot behind them. A call that is over gives them back."""
        end = first + self.num_slots
        if end > first:
            self.slot = first
            self.rows = tuple(map(self.caller.channel.row, range(first, end)))
        if self._state is CallState.OVER:
            self.let_go()
        return end

    @property
    def num_ahead(self) -> int | None:
        """Whether the file goes on is seen at its next call: that of a branch is closed before."""
        return None if self.run_kind == lib.SYM_CALL else 0

    def begin(self, reservation: Reservation, max_positions: int) -> None:
        super().begin(reservation, max_positions)
        if self.num_rows:  # what is only written is told: a turn's last tokens, perhaps
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
        """The slots of a call that has appended are the program's, with the answer."""
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
        """The run has taken the call, and may answer it: `BatchScheduler.cancel_taken` ends it from now on."""
        assert self.asked is not None
        self.asked.forget()

    def again(self, request_id: int, slot: int, token: int) -> PredCall:
        """Return a call that the run took and did not compute, as any other."""
        assert self.asked is not None
        asked = self.asked.again(request_id)
        call = PredCall(self.caller, self.file, np.array([token], np.int32), None, 1, asked.answer)
        call.loop(asked)
        call.take_slots(slot)
        return call


@dataclass(frozen=True, slots=True)
class Decision:
    """Next act of a guided generation."""

    forced: IntArray
    """Tokens that come first, and are not drawn."""
    allowed: memoryview | None
    """A bit for each token that may be drawn then."""
    is_over: bool
    """Whether the text is over."""


THE_END = Decision(np.empty(0, np.int32), None, is_over=True)
