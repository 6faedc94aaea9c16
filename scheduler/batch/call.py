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
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from kvfs.pages.table import Reservation
from kvfs.tiers.tickets import Ticket
from libsym.channel.server import ServerChannel
from libsym.errors import Invalid, SymError, TimedOut
from scheduler.batch.attention import AttentionMass
from scheduler.batch.reduction import Reduction
from scheduler.batch.states import MOVES, CallState, Early
from scheduler.programs.program import Program
from scheduler.programs.used import Used
from scheduler.trace.records import CallKind

AHEAD_ENTRIES = 64
"""Entries reserved beyond the next for a file that goes on by itself, beside the rest of its page."""

_numbers = count(1)


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


@dataclass(frozen=True, slots=True)
class EntryMask:
    """Entries that new ones see: one row of bits for all n of them, over the entries before; or a row for each.

    The bits stay packed until a step wants them: as many calls may wait as have one, of any size.
    """

    packed: npt.NDArray[np.uint8]
    """[rows, bytes], bit i % 8 of byte i / 8 for entry i."""
    num_columns: int
    """Of 1 row: the entries before; of n rows: those and n, and each of n sees itself."""

    def check(self, num_before: int, num_new: int) -> None:
        """Once it is known how many there are before. Invalid: it is no mask for them."""
        num_rows = len(self.packed)
        if num_rows == num_new and self.num_columns == num_before + num_new:
            own = np.arange(num_before, self.num_columns)
            if not (self.packed[np.arange(num_new), own // 8] >> (own % 8) & 1).all():
                raise Invalid("the mask hides a token from itself: each must see its own entry")
        elif num_rows != 1 or self.num_columns != num_before:
            raise Invalid(
                f"a mask of {num_rows} rows and {self.num_columns} columns: the file has {num_before} entries, so give "
                f"one row of {num_before} for all new tokens, or {num_new} rows of {num_before + num_new}"
            )


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
    def hot(self) -> HotFile | None:
        """Way in which its file goes on without the scheduler; None: the file does not now."""
        return None

    @property
    def num_rows(self) -> int:
        """Rows of its stretch that are wanted: none, the last, or all."""
        return 0

    @property
    def reduction(self) -> Reduction | None:
        """Reduction that rows are answered by."""
        return None

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
    @abstractmethod
    def num_answered(self) -> int:
        """Tokens or rows that its program has got of it, if it did not fail."""

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
    """A `pred()`: entries to append, and where the wanted rows go."""

    def __init__(
        self,
        caller: Caller,
        file: OpenKv,
        tokens: IntArray,
        positions: IntArray | None,
        rows: tuple[memoryview[float], ...],
        finished: Callable[[SymError | None], None],
        *,
        num_rows: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        mask: EntryMask | None = None,
        reduction: Reduction | None = None,
        attention: AttentionMass | None = None,
        hot: HotPred | None = None,
        kind: CallKind = CallKind.PREDICTION,
    ) -> None:
        """`rows`: none, one (the last token's) or one for each token. With `reduction`, or where they come later, none;
        then `num_rows` says how many are wanted.

        `finished` is called once, on the trio thread; `hot`: how a decode loop goes on from here.
        """
        super().__init__(caller, file, tokens, positions, priority=priority, deadline_s=deadline_s)
        assert not (rows and reduction is not None)
        self.kind = kind
        self.rows = rows
        self._num_rows = len(rows) if num_rows is None else num_rows
        self.mask = mask
        self.attention = attention
        self._finished = finished
        self._reduction = reduction
        self._hot = hot

    @property
    def num_ahead(self) -> int | None:
        """Whether the file goes on is seen at its next call: that of a branch is closed before."""
        return None if self.hot is None else 0

    @property
    def hot(self) -> HotPred | None:
        return self._hot

    def begin(self, reservation: Reservation, max_positions: int) -> None:
        super().begin(reservation, max_positions)
        if self._num_rows:  # what is only written is told: a turn's last tokens, perhaps
            self.file.content.goes_on(None)

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def num_answered(self) -> int:
        return self._num_rows

    @property
    def reduction(self) -> Reduction | None:
        return self._reduction

    def end(self, error: SymError | None) -> None:
        self._finished(error)

    def let_go(self) -> None:
        super().let_go()
        self.rows = ()


# What a file needs to go on without the scheduler: see `loop.c`.


@dataclass(frozen=True, slots=True)
class HotPred:
    """A `pred()` of one token whose successors may come from the ring: by the same program, for the same file."""

    channel: ServerChannel
    handle: int
    request_id: int
    slot: int
    wake: Callable[[], None]
    """Have the gate look at the program's ring."""
    entered: Callable[[], None]
    """The run has taken it: `BatchScheduler.cancel_taken` ends it from now on."""
    answer: Callable[[int, int, int], None]
    """(request, slot, entries of the file now): what the run found no room to send."""
    again: Callable[[int, int, int], PredCall]
    """(request, slot, token): a call that the run took and did not compute, as any other."""


@dataclass(frozen=True, slots=True)
class HotGeneration:
    """A `generate()` whose tokens the run draws."""

    channel: ServerChannel
    request_id: int
    generation: Any
    """A `sym_generation`."""
    num_rows: int
    """Rows that it needs memory of its own for; 0: of a step."""
    decide: Callable[[int], Decision] | None
    """Says in a thread of its own, while a step runs, what may be drawn next, from the token that was drawn, below 0 if
    none was yet. None: anything may."""


HotFile: TypeAlias = HotPred | HotGeneration


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
