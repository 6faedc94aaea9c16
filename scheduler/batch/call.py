"""Calls that append to a KV file, from their place in its queue to the steps that compute them.

A call lives through one stretch or several. A *stretch* is what it appends at once: reserved together, committed
together. A `pred()` has one; a `generate()` has one for each crossing of the model that its tokens take.
"""

from __future__ import annotations

import errno
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from decoder.batch import BoolArray, Chunk, IntArray
from kvfs.fs import OpenKv
from kvfs.pages.table import Reservation
from libsym.abi import PAGE_ENTRIES
from libsym.channel.server import ServerChannel
from libsym.errors import Invalid, SymError, TimedOut
from libsym.rows.sampler import RowSampler

Rows: TypeAlias = "Sequence[memoryview[float]]"
"""Buffers of float32 [vocab], one for each row of logits."""


class Caller(Protocol):
    """What the scheduler knows of a LIP."""

    @property
    def pid(self) -> int: ...


@dataclass(frozen=True, slots=True)
class EntryMask:
    """Which entries new ones see: one row of bits for all n of them, over the entries before; or a row for each.

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

    def rows(self, num_before: int, first: int, end: int) -> BoolArray:
        """[end - first, num_before + end]: of the new tokens `first` to `end`, over the entries up to the last."""
        if self.num_columns > num_before:
            return self._bits(self.packed[first:end], num_before + end)
        causal = np.tri(end - first, end, first, dtype=np.bool_)
        return np.concatenate((np.repeat(self._bits(self.packed, num_before), end - first, axis=0), causal), axis=1)

    @staticmethod
    def _bits(packed: npt.NDArray[np.uint8], count: int) -> BoolArray:
        return np.unpackbits(packed, axis=1, count=count, bitorder="little").view(np.bool_)


class FileCall(ABC):
    """What the batch scheduler queues, reserves, computes and commits."""

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
        self.caller = caller
        self.file = file
        self.priority = priority
        self.deadline_s = deadline_s
        """In the time of `time.monotonic()`: CLOCK_MONOTONIC."""
        self.tokens = tokens
        """What this stretch appends."""
        self.positions = positions
        """None: they go on after the last entry's."""
        self.mask: EntryMask | None = None
        self.reservation: Reservation | None = None
        """Of the stretch's entries, and maybe of some more, which the next stretches will take."""
        self.num_done = 0
        """Entries of this stretch that are computed."""
        self.cancelled = False
        """It was ended early, by whoever wanted it or because it is late."""
        self.is_late = False
        """Its deadline has passed."""
        self.is_dropped = False
        """Nobody waits for its answer any more."""
        self.is_running = False
        self.is_waiting_for_rows = False
        """It has its place in its file's queue, and does not begin before it has its result slots."""
        self.num_appended = 0
        """Entries committed, of all stretches."""
        self.num_rejected = 0
        """Computed and given back, for what was drawn is not the draft."""
        self.submitted_s = time.perf_counter()
        self.waiting_since_s = self.submitted_s
        """Since when it has been ready to be computed: of its present stretch."""
        self.accounts: tuple[int, ...] = ()
        """Of those who pay for its file: a uid, then the domains that the file is in, the inmost last."""
        self.compute_s = 0.0
        """Time of the steps that held some of it."""

    @property
    def num_left(self) -> int:
        """Entries of this stretch that are still to be computed."""
        return len(self.tokens) - self.num_done

    @property
    def hot(self) -> HotFile | None:
        """How its file may go on without the scheduler; None: it may not."""
        return None

    @property
    def num_digested(self) -> int:
        """Rows that `digest` wants: 0, 1 (the last) or one for each token."""
        return 0

    def begin(self, reservation: Reservation, max_positions: int) -> None:
        """Its turn has come, and there is room. Invalid: what it asks for does not fit the file."""
        del max_positions
        self.reservation = reservation
        self.num_done = 0
        self.waiting_since_s = time.perf_counter()
        table = self.file.table
        self.accounts = table.pool.accounts.of(table.owner).numbers
        if self.mask is not None:
            self.mask.check(reservation.start, len(self.tokens))

    def chunk(self, num_now: int, scratch: Rows) -> Chunk:
        """The next `num_now` entries, with the page table up to their end; rows to digest go to `scratch`."""
        reservation = self.reservation
        assert reservation is not None
        first, end = self.num_done, self.num_done + num_now
        num_pages = -(-(reservation.start + end) // PAGE_ENTRIES)
        return Chunk(
            tokens=reservation.tokens[first:end],
            positions=reservation.positions[first:end],
            pages=reservation.frames(num_pages),
            start=reservation.start + first,
            rows=tuple(scratch) if self.num_digested else self.slots(first, end),
            mask=None if self.mask is None else self.mask.rows(reservation.start, first, end),
        )

    def num_scratch(self, num_now: int) -> int:
        """Rows of the next `num_now` entries that go to scratch."""
        if self.num_digested == len(self.tokens):
            return num_now
        return int(bool(self.num_digested) and num_now == self.num_left)

    def slots(self, first: int, end: int) -> tuple[memoryview[float], ...]:
        """Where the logits of these tokens go, if somebody waits for all of them: none, one or each."""
        del first, end
        return ()

    @abstractmethod
    def digest(self, first: int, rows: Rows) -> None:
        """In the step's thread: take from rows what they were wanted for; the first is the one after token `first`."""

    @abstractmethod
    def end_stretch(self) -> int:
        """The stretch is computed: how many of its entries are to be committed."""

    @abstractmethod
    def next_stretch(self) -> bool:
        """After the commit: whether there is another stretch; `tokens` and `positions` are its."""

    def cancellation(self) -> SymError | None:
        """What a call that was ended early ends with. One that is late ends well if it had its last step by then."""
        if self.is_late:
            return TimedOut("the deadline has passed; nothing was appended") if self.num_left else None
        return SymError("the call was cancelled; nothing was appended", errno.ECANCELED)

    @abstractmethod
    def end(self, error: SymError | None) -> None:
        """It is over. Called once, on the trio thread, unless nobody waits for it any more."""

    def let_go(self) -> None:
        """It is over, and so is its use of pages and of the program's memory, whoever still refers to it."""
        self.reservation = None


class PredCall(FileCall):
    """One `pred()`: entries to append, and where the wanted rows go."""

    def __init__(
        self,
        caller: Caller,
        file: OpenKv,
        tokens: IntArray,
        positions: IntArray | None,
        rows: tuple[memoryview[float], ...],
        finished: Callable[[SymError | None], None],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        mask: EntryMask | None = None,
        num_digested: int = 0,
        digest: Callable[[int, Rows], None] | None = None,
        hot: HotFile | None = None,
    ) -> None:
        """`rows`: none, one (the last token's) or one for each token; with `digest` none, see there.

        `finished` is called once, on the trio thread; `hot`: how a decode loop goes on from here.
        """
        super().__init__(caller, file, tokens, positions, priority=priority, deadline_s=deadline_s)
        assert not (rows and num_digested)
        self.rows = rows
        self.mask = mask
        self._finished = finished
        self._num_digested = num_digested
        self._digest = digest
        self._hot = hot

    @property
    def num_digested(self) -> int:
        return self._num_digested

    @property
    def hot(self) -> HotFile | None:
        return self._hot

    def slots(self, first: int, end: int) -> tuple[memoryview[float], ...]:
        if len(self.rows) == len(self.tokens):
            return self.rows[first:end]
        return self.rows if end == len(self.tokens) else ()

    def digest(self, first: int, rows: Rows) -> None:
        assert self._digest is not None
        self._digest(first, rows)

    def end_stretch(self) -> int:
        return len(self.tokens)

    def next_stretch(self) -> bool:
        return False

    def end(self, error: SymError | None) -> None:
        self._finished(error)

    def let_go(self) -> None:
        super().let_go()
        self.rows = ()


# What a decode loop needs to go on without the scheduler: see `loop.c`.


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
    """A loop has taken it: it can't be cancelled any more."""
    answer: Callable[[int, int, int], None]
    """(request, slot, entries of the file now): what the loop found no room to send."""
    again: Callable[[int, int, int], PredCall]
    """(request, slot, token): a call that the loop took and did not compute, as any other."""


@dataclass(frozen=True, slots=True)
class HotGeneration:
    """A `generate()` that needs nothing but its sampler."""

    channel: ServerChannel
    request_id: int
    sampler: RowSampler
    draw_index: int
    stop_tokens: frozenset[int]
    num_to_emit: int


HotFile: TypeAlias = HotPred | HotGeneration
