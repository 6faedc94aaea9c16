"""Who has pages in memory: calls wait for theirs in order, and what is worth least makes room.

A *ticket* is somebody who needs pages: all of them at once, or none. While it waits it holds nothing, so tickets can't
wait for each other. The first in order gets every frame that becomes free, until it has as many as it needs. Then its
pages are pinned, new ones get frames, what is on disk is read, and the next in order has its turn. A ticket that has its
frames waits for the disk alone. Frames become free in four ways, tried in this order:

- pages that are on disk as they are lose their frame at once, and others when they are written, in the policy's order;
- programs in the run that think are asked to leave it;
- calls of a lower priority are, and then those that have been there for long (`Preempt`);
- files are removed, and calls end, by themselves.

Where nothing of that is to be expected the first ticket fails: NoSpace, or what the disk said.

*Hints* want pages in memory that nobody needs yet. They come behind all tickets, and take nothing from files that are
used.

All of it on the trio thread; nothing here waits but `run`, and those who say so.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np
import trio

from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import NO_ROW, PagePool
from kvfs.pages.table import PageTable, Reservation
from kvfs.tiers.candidates import ComputeS, candidates, in_order
from kvfs.tiers.policy import Files, FloatArray, Gaps, Rank
from kvfs.tiers.residents import Residents
from libsym.errors import Busy, NoSpace, SymError

log = logging.getLogger(__name__)

LOW_WATER_SHARE = 64
"""This part of all frames is kept free, as long as something may go down."""
CLEAN_SHARE = 8
"""With less than this part free, what would go down next is written before it has to."""
CLEANED_AT_ONCE = 64
LOOKS_EACH_S = 0.25
FULL_FOR_S = 0.05
FIRST_BRING_S = 1e-3
"""What reading a page takes, until some were read."""
_NEWS_SHARE = 0.2
HINT_LIVES_S = 10.0
UNUSED_S = 1.0
"""What was not used for so long may go down for a hint."""
MAX_HINTS = 1024
BUSY_AFTER_S = 30.0
"""So long a file is waited for that is to go to disk and is computed with."""
SAYS_EACH_S = 60.0

Then = Callable[[SymError | None], None]


class Mover(Protocol):
    """Moves pages between memory and disk, in jobs that end on the trio thread."""

    @property
    def deadline_s(self) -> float:
        """Whoever waits longer than this without any job's end is told that the disk does not answer."""
        ...

    def bring_in(self, pages: IntArray, frames: IntArray, then: Then) -> None:
        """Read pages into frames; `then` is told when no job writes there any more."""
        ...

    def write_out(self, pages: IntArray, then: Then) -> None:
        """Have pages on disk as far as they are computed; `then` is told when no job reads them any more."""
        ...

    def late(self) -> SymError:
        """For those who have waited too long."""
        ...


class Preempt(Protocol):
    """Who computes."""

    def __call__(self, num_frames: int, priority: int, waited_s: float) -> bool:
        """Somebody who waits for so long needs so many: have some leave. False: there is nobody who may have to."""
        ...


class Pressure(Protocol):
    """Who is told before files go down."""

    def tell(self, tables: Sequence[PageTable], num_pages: int) -> float:
        """So many pages of these are about to go: how many seconds their programs have to do something about it."""
        ...


@dataclass(slots=True, eq=False)
class Ticket:
    """Somebody who waits for pages."""

    number: int
    priority: int
    owner: int
    """The account whose pages they are."""
    old_pages: IntArray
    """That are to be in memory, and pinned."""
    num_new: int
    """Frames for pages that hold nothing yet."""
    admitted: Callable[[IntArray], None]
    """It is given those; what was free of `old_pages` is pinned."""
    over: Then
    """All is there; or not, and nothing is pinned."""
    since_s: float
    unpin: Callable[[], None]
    num_reading: int = 0
    is_admitted: bool = False
    is_over: bool = False
    is_cancelled: bool = False
    error: SymError | None = None

    def tell(self) -> None:
        """Whoever waits for it hears how it ended."""
        if not self.is_cancelled:
            self.over(None if self.error is None else copy(self.error))

    @property
    def order(self) -> tuple[int, int]:
        return -self.priority, self.number


@dataclass(slots=True, eq=False)
class _Reading:
    """Pages that are being read."""

    pages: IntArray
    frames: IntArray
    generations: IntArray
    owner: int
    since_s: float
    tickets: list[Ticket] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """How full memory is, and what has moved since the daemon started. In pages, unless it says otherwise."""

    num_frames: int
    num_free_frames: int
    num_computing: int
    """In memory, and needed there now."""
    num_kept: int
    """In memory by advice."""
    num_on_disk_alone: int
    num_in: int
    num_out: int
    """Written to make room, or ahead of that."""
    num_dropped: int
    """That lost their frame."""
    num_waiting: int
    """Calls."""
    num_waits: int
    """Calls that had to wait for pages."""
    wait_s: float
    """How long they did, together."""
    num_resumes: int
    """Files that were used again after pages of theirs went down, and a pause long enough to bring them back."""
    num_hidden: int
    """Those of them whose pages were all back before the call."""
    num_hints: int
    bring_s: float
    """What reading a page takes."""
    error: str
    """Why the last page could not be moved; empty since one was."""


class Pager:
    """The memory of one pool."""

    def __init__(self, pool: PagePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self.residents = Residents(clock)
        self.mover: Mover | None = None
        """None: what has no frame never gets one, and nothing goes down."""
        self.rank: Rank = _least_recent
        self.compute_s: ComputeS = _unknown
        """What computing so many pages of entries takes."""
        self.preempt: Preempt = _nobody
        self.idle_out: Callable[[], None] = lambda: None
        """Told now and then while memory is short: who only keeps pages from going may let them go."""
        self.pressure: Pressure | None = None
        self.max_kept_share = 0.5
        """Of memory, that advice may keep there."""
        self._numbers = count()
        self._waiting: list[tuple[tuple[int, int], Ticket]] = []  # a heap
        self._reading: dict[int, _Reading] = {}  # by page
        self._hints: dict[PageTable, float] = {}
        self._hinting: dict[PageTable, PageTable] = {}
        """Files that are being read for a hint, and what holds their pages meanwhile."""
        self._due: list[Callable[[], None]] = []
        self._full_until_s = 0.0
        """Nothing could go down when it was looked last: no need to look again before."""
        self._returns: list[tuple[float, int, int]] = []  # a heap: when, the row, its uses then
        self._going_down: dict[int, float] = {}
        """Pages that are being written to lose their frame, and since when."""
        self._cleaning: set[int] = set()
        self._grace_until_s = 0.0
        self._told_at_s = -1e9
        self._look_at_s = float("inf")
        self._idled_at_s = -1e9
        self._progress_s = clock()
        """When a job ended last, or the first of some began."""
        self._num_jobs = 0
        self._error: SymError | None = None
        self._error_at_s = -1e9
        self._changed = trio.Event()
        self._is_advancing = False
        self._bring_s = FIRST_BRING_S
        self._num_in = self._num_out = self._num_dropped = self._num_waits = self._num_hints = 0
        self._num_resumes = self._num_hidden = 0
        self._wait_s = 0.0
        pool.released = self._note_released
        pool.low_water = 0

    def start(self, mover: Mover) -> None:
        """Pages may go down, and come back, from now on."""
        self.mover = mover
        self._pool.low_water = max(1, self._pool.num_frames // LOW_WATER_SHARE)
        self._pool.when_low = self._wake

    # ---- files

    def add(self, table: PageTable, priority: int = 0) -> None:
        """There is a new file."""
        table.row = self.residents.add(table)
        self.residents.priority[table.row] = priority

    def remove(self, table: PageTable) -> None:
        """Nobody has the file any more; it still has its pages. What it shares is its source's again."""
        pages, source = table.pages, table.source
        mine = pages[self._pool.row_of[pages] == table.row]
        if mine.size:
            self._pool.row_of[mine] = NO_ROW if source is None else source.row
            if source is not None and source.row != NO_ROW:
                last_use_s = self.residents.last_use_s
                last_use_s[source.row] = max(last_use_s[source.row], last_use_s[table.row])
        if self.residents.pinned_until_s[table.row]:
            self.unpin_file(table)
        self._hints.pop(table, None)
        self.residents.remove(table.row)
        table.row = NO_ROW

    def opened(self, table: PageTable) -> None:
        """A program has it open."""
        self.residents.num_users[table.row] += 1

    def closed(self, table: PageTable) -> None:
        """One less has."""
        self.residents.num_users[table.row] -= 1

    def num_in_memory(self, table: PageTable) -> int:
        """Of its pages."""
        return int(np.count_nonzero(self._pool.store.of[table.pages] != NOWHERE))

    def tier_of(self, table: PageTable) -> str:
        """Where its pages are: `memory`, `disk`, or some here and some there: `mixed`."""
        num_here = self.num_in_memory(table)
        return "memory" if num_here == len(table.pages) else "mixed" if num_here else "disk"

    # ---- calls

    def acquire(self, reservation: Reservation, priority: int, then: Then) -> Ticket | None:
        """A call is to be computed. None: all its pages are in memory, and pinned now. Else `then` is told later, unless
        the ticket is given to `cancel`; NoSpace: they never will be.
        """
        table, pool = reservation.table, self._pool
        pages, row = reservation.needed(), table.row
        is_missing = pool.store.of[pages] == NOWHERE
        new = reservation.new_pages
        is_new = np.isin(pages, new) if is_missing.any() else _NO_PLACES
        if row != NO_ROW:
            self._note_use(row, is_hidden=not is_missing.any() or not is_missing[~is_new].any())
        if not is_missing.any():
            reservation.ready(pages, row)
            return None
        reservation.forget_frames()

        def admitted(frames: IntArray) -> None:
            reservation.give_frames(frames)
            reservation.ready(pages, row)

        ticket = self._ticket(priority, table.owner, pages[~is_new], new.size, admitted, then, reservation.unpin)
        self._num_waits += 1
        self._ask(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for it any more; what is pinned for it is let go."""
        ticket.is_cancelled = True
        if not ticket.is_over:
            self._end(ticket, None)
            self._wake()

    def _note_use(self, row: int, *, is_hidden: bool) -> None:
        went_down = int(self.residents.went_down[row])
        gap_s = self.residents.begin_use(row)
        if went_down and gap_s > went_down * self._bring_s:
            self._num_resumes += 1
            self._num_hidden += is_hidden

    def _note_released(self, row: int) -> None:
        """A call has let go of its pages, or a file was removed."""
        if row != NO_ROW:
            self.residents.end_use(row)
        if self._waiting or self._hints:
            self._wake()

    # ---- others that need pages

    async def room(self, num_pages: int, owner: int, priority: int = 0) -> IntArray:
        """Frames for new pages, for `PagePool.allocate`, or for `return_frames`. NoSpace: there will be none."""
        got: list[IntArray] = []
        if num_pages:
            await self._wait_for(_NONE, num_pages, owner, priority, got.append)
        return got[0] if got else _NONE

    @asynccontextmanager
    async def hold(self, tables: Iterable[PageTable], priority: int = 0) -> AsyncIterator[None]:
        """Have all pages of files in memory, and keep them there. The caller sees to it that the files stay."""
        kept = list(tables)
        pages = np.unique(np.concatenate([_NONE, *(table.pages for table in kept)]))
        if pages.size and (self._pool.store.of[pages] == NOWHERE).any():
            await self._wait_for(pages, 0, kept[0].owner, priority, lambda _frames: None)
        else:
            self._pool.pin(pages)
        try:
            yield
        finally:
            self._unpin(pages)

    async def _wait_for(
        self, pages: IntArray, num_new: int, owner: int, priority: int, got: Callable[[IntArray], None]
    ) -> None:
        is_over = trio.Event()
        frames: list[IntArray] = []

        def admitted(found: IntArray) -> None:
            self._pool.pin(pages)
            frames.append(found)
            self._pool.num_coming += found.size

        def over(_error: SymError | None) -> None:
            is_over.set()

        ticket = self._ticket(priority, owner, pages, num_new, admitted, over, lambda: self._unpin(pages))
        self._ask(ticket)
        try:
            await is_over.wait()
        except trio.Cancelled:
            if ticket.is_over and ticket.error is None:
                self._unpin(pages)
            self.cancel(ticket)
            if frames:
                self._pool.return_frames(frames[0])
            raise
        if ticket.error is not None:
            if frames:
                self._pool.return_frames(frames[0])
            raise copy(ticket.error)
        got(frames[0])

    def _unpin(self, pages: IntArray) -> None:
        self._pool.unpin(pages)
        self._pool.last_use[pages] = self._clock()
        self._wake()

    # ---- advice

    def will_need(self, table: PageTable) -> None:
        """It is worth having in memory soon."""
        if self.mover is None or table.row == NO_ROW:
            return
        self.residents.wanted_s[table.row] = self._clock()
        self.residents.is_cold[table.row] = False
        if (self._pool.store.of[table.pages] == NOWHERE).any() and len(self._hints) < MAX_HINTS:
            self._hints[table] = self._clock()
            self._wake()

    def demote(self, table: PageTable) -> None:
        """It is not worth memory before it is used again. What others used after it stays."""
        if self.mover is None or table.row == NO_ROW:
            return
        self._hints.pop(table, None)
        self.residents.is_cold[table.row] = True
        self.residents.wanted_s[table.row] = 0
        pages = table.pages
        self._send_down(self._free_of(pages[self._pool.row_of[pages] == table.row]))

    async def put_on_disk(self, table: PageTable) -> None:
        """Return when no page of it is in memory. Busy: it is being computed with; NoSpace, EIO: the disk says so."""
        if self.mover is None:
            raise NoSpace("nothing goes to disk here: the daemon was started with --policy none, or keeps no state")
        self.demote(table)
        ends_s = self._clock() + BUSY_AFTER_S
        while not table.closed and (found := self._here(table.pages)).size:
            self._send_down(self._free_of(found))
            if self._error is not None and not self._going_down and self._here(table.pages).size:
                raise copy(self._error)
            if self._clock() > ends_s:
                raise Busy("the file is being computed with: try again when it is not")
            if self._here(table.pages).size:
                await trio.sleep(0.01)

    async def put_in_memory(self, table: PageTable) -> None:
        """Return when all of it is in memory; it stays there as long as it is worth it."""
        async with self.hold([table]):
            if table.row != NO_ROW:
                self.residents.wanted_s[table.row] = self._clock()
                self.residents.is_cold[table.row] = False

    def pin_file(self, table: PageTable, until_s: float) -> None:
        """It does not go down before. NoSpace: as much is kept by advice as may be."""
        pool, now_s = self._pool, self._clock()
        pages = table.pages
        num_others = int(np.count_nonzero(pool.keep_until > now_s))
        num_more = int(np.count_nonzero(pool.keep_until[pages] <= now_s))
        may_be = int(pool.num_frames * self.max_kept_share)
        if num_others + num_more > may_be:
            raise NoSpace(
                f"{num_others} of {pool.num_frames} pages of memory are pinned, {num_more} more are wanted, and at most "
                f"{may_be} may be: unpin others, or start the daemon with more KV memory"
            )
        self.residents.pinned_until_s[table.row] = until_s
        pool.keep_until[pages] = np.maximum(pool.keep_until[pages], until_s)
        self.will_need(table)

    def unpin_file(self, table: PageTable) -> None:
        """It may go down again."""
        residents = self.residents
        residents.pinned_until_s[table.row] = 0
        self._pool.keep_until[table.pages] = 0
        for row in np.flatnonzero(residents.pinned_until_s[: residents.num_rows] > self._clock()).tolist():
            other = residents.tables[row]
            if other is not None:
                keep_until = self._pool.keep_until
                keep_until[other.pages] = np.maximum(keep_until[other.pages], residents.pinned_until_s[row])
        self._wake()

    def num_kept(self, tables: Iterable[PageTable]) -> int:
        """Pages of these that advice keeps in memory."""
        pages = np.unique(np.concatenate([_NONE, *(table.pages for table in tables)]))
        return int(np.count_nonzero(self._pool.keep_until[pages] > self._clock()))

    # ---- tickets

    def _ticket(
        self,
        priority: int,
        owner: int,
        old_pages: IntArray,
        num_new: int,
        admitted: Callable[[IntArray], None],
        over: Then,
        unpin: Callable[[], None],
    ) -> Ticket:
        return Ticket(next(self._numbers), priority, owner, old_pages, num_new, admitted, over, self._clock(), unpin)

    def _ask(self, ticket: Ticket) -> None:
        heapq.heappush(self._waiting, (ticket.order, ticket))
        self._wake()
        self._advance()

    def _end(self, ticket: Ticket, error: SymError | None) -> None:
        """It gets nothing, or gives back what it has."""
        self._is_over(ticket)
        ticket.error = error
        if ticket.is_admitted:
            ticket.unpin()

    def _is_over(self, ticket: Ticket) -> None:
        ticket.is_over = True
        self._wait_s += self._clock() - ticket.since_s

    def _fail(self, ticket: Ticket, error: SymError) -> None:
        self._end(ticket, error)
        self._soon(ticket.tell)

    def _soon(self, function: Callable[[], None]) -> None:
        """From `run`: whoever asks is in the middle of something."""
        self._due.append(function)
        self._wake()

    @property
    def num_waiting(self) -> int:
        return sum(not ticket.is_over for _, ticket in self._waiting)

    def _wake(self) -> None:
        self._changed.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """For ever."""
        task_status.started()
        while True:
            with trio.move_on_after(self._sleep_s()):
                await self._changed.wait()
            self._changed = trio.Event()
            due, self._due = self._due, []
            for function in due:
                function()
            self._hint_returns()
            self._look_for_late()
            self._advance()
            self._clean_ahead()
            await trio.lowlevel.checkpoint()

    def _sleep_s(self) -> float:
        now_s, until_s = self._clock(), self._look_at_s
        if self._returns:
            until_s = min(until_s, self._returns[0][0])
        if self._waiting or self._hints or self._num_jobs:
            until_s = min(until_s, now_s + LOOKS_EACH_S)
        return max(0.0, until_s - now_s)

    def _advance(self) -> None:
        """Give frames to those who are first."""
        if self._is_advancing or self.mover is None:
            return
        self._is_advancing = True
        try:
            self._look_at_s = float("inf")
            while self._waiting:
                ticket = self._waiting[0][1]
                if not ticket.is_over and not self._try(ticket):
                    break
                heapq.heappop(self._waiting)
            else:
                self._pool.num_promised = 0
                self._advance_hints()
            self._keep_some_free()
        finally:
            self._is_advancing = False

    def _try(self, ticket: Ticket) -> bool:
        """The first in order. False: it has to wait."""
        pool = self._pool
        pool.num_promised = 0
        if ticket.old_pages.size + ticket.num_new > pool.num_frames:
            self._fail(
                ticket,
                NoSpace(
                    f"{ticket.old_pages.size + ticket.num_new} pages are needed in memory at once, and there is room "
                    f"for {pool.num_frames}: start the daemon with more KV memory"
                ),
            )
            return True
        short = self._num_wanted(ticket) - pool.store.num_free
        if short > 0 and self._make_room(short, ticket):
            short = self._num_wanted(ticket) - pool.store.num_free
        if ticket.is_over:
            return True
        if short > 0:
            pool.num_promised = pool.store.num_free
            return False
        self._admit(ticket)
        return True

    def _num_wanted(self, ticket: Ticket) -> int:
        return self._cold(ticket).size + ticket.num_new

    def _cold(self, ticket: Ticket) -> IntArray:
        """What has to be read for it, and nobody reads yet."""
        missing = ticket.old_pages[self._pool.store.of[ticket.old_pages] == NOWHERE]
        if not self._reading:
            return missing
        return np.array([page for page in missing.tolist() if page not in self._reading], np.int32)

    def _admit(self, ticket: Ticket) -> None:
        pool = self._pool
        cold = self._cold(ticket)
        missing = ticket.old_pages[pool.store.of[ticket.old_pages] == NOWHERE]
        under_way = dict.fromkeys(self._reading[page] for page in missing.tolist() if page in self._reading)
        ticket.admitted(pool.store.take(ticket.num_new))
        ticket.is_admitted = True
        for reading in under_way:
            reading.tickets.append(ticket)
        ticket.num_reading = len(under_way)
        if cold.size:
            ticket.num_reading += 1
            self._read(cold, ticket)
        if not ticket.num_reading:
            self._is_over(ticket)
            self._soon(ticket.tell)

    # ---- coming in

    def _read(self, pages: IntArray, ticket: Ticket) -> None:
        pool = self._pool
        assert self.mover is not None
        frames = pool.take_frames(pages.size)
        generations = pool.on_disk.generations(pages)
        reading = _Reading(pages, frames, generations, ticket.owner, self._clock(), [ticket])
        self._reading |= dict.fromkeys(pages.tolist(), reading)
        self._begin_job()
        self.mover.bring_in(pages, frames, lambda error: self._is_read(reading, error))

    def _is_read(self, reading: _Reading, error: SymError | None) -> None:
        pool, pages, frames = self._pool, reading.pages, reading.frames
        self._end_job()
        for page in pages.tolist():
            del self._reading[page]
        if error is not None:
            pool.return_frames(frames)
        else:
            stays = (pool.on_disk.generations(pages) == reading.generations) & (pool.refcount[pages] > 0)
            pool.end_bringing(pages[stays], frames[stays], reading.owner)
            pool.return_frames(frames[~stays])
            self._num_in += pages.size
            took_s = (self._clock() - reading.since_s) / pages.size
            self._bring_s += _NEWS_SHARE * (took_s - self._bring_s)
        for ticket in reading.tickets:
            ticket.num_reading -= 1
            if ticket.is_over:
                continue
            if error is not None:
                self._fail(ticket, error)
            elif not ticket.num_reading:
                self._is_over(ticket)
                self._soon(ticket.tell)
        self._wake()

    # ---- going down

    def _make_room(self, num_frames: int, ticket: Ticket) -> bool:
        """Have so many more frames free for whoever is first, soon. True: some are already."""
        now_s = self._clock()
        wanted = num_frames - len(self._going_down)
        if wanted <= 0:
            return False
        found = self._victims(ticket.old_pages)
        margin = self._pool.low_water
        taken = found[: wanted + margin]
        if taken.size and self._is_grace(taken, now_s):
            return False
        num_dropped = self._send_down(taken)
        expected = num_dropped + len(self._going_down)
        if expected >= num_frames:
            return num_dropped > 0
        waited_s = now_s - ticket.since_s
        somebody_leaves = self.preempt(num_frames - expected, ticket.priority, waited_s)
        if somebody_leaves or self._going_down or self._reading or self._are_others_pinned(ticket):
            self._look_at_s = min(self._look_at_s, now_s + LOOKS_EACH_S)
            return num_dropped > 0
        if self._error is not None and now_s - self._error_at_s < LOOKS_EACH_S * 4:
            self._fail(ticket, self._error)
        else:
            self._fail(ticket, self._no_room(num_frames))
        return True

    def _no_room(self, num_frames: int) -> SymError:
        pool = self._pool
        num_kept = int(np.count_nonzero(pool.keep_until > self._clock()))
        return NoSpace(
            f"memory is full: {num_frames} pages more are needed there, {num_kept} of {pool.num_frames} are pinned by "
            "advice, and nothing else may go to disk: unpin files, remove some, or start the daemon with more KV memory"
        )

    def _are_others_pinned(self, ticket: Ticket) -> bool:
        """Whether somebody else has pages that will be let go."""
        pool = self._pool
        pages = pool.store.page_of
        pages = pages[pages != NOWHERE]
        return bool(pool.num_coming or (pool.pins[pages] > 0).any())

    def _victims(self, keep: IntArray) -> IntArray:
        """Pages that may go, the first to go first; `keep`: not these."""
        pool, now_s = self._pool, self._clock()
        if now_s - self._idled_at_s > LOOKS_EACH_S:
            self._idled_at_s = now_s
            self.idle_out()
        found = candidates(pool)
        if keep.size:
            found = found[~np.isin(found, keep)]
        if self._error is not None and now_s - self._error_at_s < LOOKS_EACH_S:
            found = found[pool.on_disk.kept[found] >= pool.computed(found)]  # what the disk takes nothing of stays
        return in_order(pool, self.residents, found, self.rank, now_s, self._bring_s, self.compute_s)

    def _is_grace(self, pages: IntArray, now_s: float) -> bool:
        """Whether programs are told of it first, and have some time."""
        if now_s < self._grace_until_s:
            return True
        if self.pressure is None or now_s - self._told_at_s < LOOKS_EACH_S:
            return False
        rows = np.unique(self._pool.row_of[pages])
        tables = [self.residents.tables[row] for row in rows.tolist() if row != NO_ROW]
        self._told_at_s = now_s
        grace_s = self.pressure.tell([table for table in tables if table is not None], int(pages.size))
        if grace_s <= 0:
            return False
        self._grace_until_s = self._look_at_s = now_s + grace_s
        self._told_at_s = now_s + grace_s
        return True

    def _free_of(self, pages: IntArray) -> IntArray:
        """Those that are in memory and may go."""
        pool = self._pool
        found: IntArray = pages[
            (pool.store.of[pages] != NOWHERE) & (pool.pins[pages] == 0) & (pool.computed(pages) > 0)
        ]
        return found

    def _here(self, pages: IntArray) -> IntArray:
        found: IntArray = pages[self._pool.store.of[pages] != NOWHERE]
        return found

    def _send_down(self, pages: IntArray) -> int:
        """These lose their frames: now, if they are on disk as they are, or when they are written. How many have."""
        pool = self._pool
        is_clean = pool.on_disk.is_kept(pages, pool.computed(pages))
        self._drop(pages[is_clean])
        dirty = pages[~is_clean]
        if dirty.size:
            now_s = self._clock()
            self._going_down |= dict.fromkeys(dirty.tolist(), now_s)
            self._write(dirty)
        return int(np.count_nonzero(is_clean))

    def _drop(self, pages: IntArray) -> None:
        if not pages.size:
            return
        pool, residents = self._pool, self.residents
        pool.drop_frames(pages)
        self._num_dropped += pages.size
        rows = pool.row_of[pages]
        rows = rows[rows != NO_ROW]
        for row, num in zip(*np.unique(rows, return_counts=True), strict=True):
            table = residents.tables[row]
            if table is None:
                continue
            if not residents.went_down[row] and (expected_s := residents.expected_s(row)) is not None:
                lead_s = 2 * self._bring_s * len(table.pages)
                heapq.heappush(self._returns, (expected_s - lead_s, int(row), int(residents.num_uses[row])))
            residents.went_down[row] += num

    def _write(self, pages: IntArray) -> None:
        assert self.mover is not None
        self._pool.pin(pages)
        self._begin_job()
        self.mover.write_out(pages, lambda error: self._is_written(pages, error))

    def _is_written(self, pages: IntArray, error: SymError | None) -> None:
        pool = self._pool
        self._end_job()
        pool.unpin(pages)
        if error is not None:
            self._note_error(error)
        else:
            self._error = None
            self._num_out += pages.size
        since_s = np.array([self._going_down.pop(page, -1.0) for page in pages.tolist()])  # -1: written ahead
        self._cleaning.difference_update(pages.tolist())
        due = self._free_of(pages[since_s >= pool.last_use[pages]])
        self._drop(due[pool.on_disk.is_kept(due, pool.computed(due))])
        self._wake()

    def _note_error(self, error: SymError) -> None:
        if self._error is None or self._clock() - self._error_at_s > SAYS_EACH_S:
            log.error("pages can't go to disk: %s", error)
        self._error, self._error_at_s = error, self._clock()

    def _keep_some_free(self) -> None:
        """So that whoever needs a page gets it at once."""
        pool = self._pool
        short, now_s = pool.low_water - pool.store.num_free - len(self._going_down), self._clock()
        if short > 0 and not self._waiting and now_s >= self._full_until_s:
            taken = self._victims(_NONE)[: short + pool.low_water]
            if taken.size and not self._is_grace(taken, now_s):
                self._send_down(taken)
            if not taken.size:
                self._full_until_s = now_s + FULL_FOR_S

    def _clean_ahead(self) -> None:
        """Write what would go down next, while nobody waits for it."""
        pool = self._pool
        if self.mover is None or self._cleaning or self._going_down or self._waiting or self._num_jobs:
            return
        if pool.store.num_free * CLEAN_SHARE > pool.num_frames:
            return
        found = self._victims(_NONE)[: pool.num_frames // CLEAN_SHARE]
        dirty = found[~pool.on_disk.is_kept(found, pool.computed(found))][:CLEANED_AT_ONCE]
        if dirty.size:
            self._cleaning.update(dirty.tolist())
            self._write(dirty)

    # ---- hints

    def _hint_returns(self) -> None:
        """Files that usually come back about now."""
        now_s, residents = self._clock(), self.residents
        while self._returns and self._returns[0][0] <= now_s:
            _, row, num_uses = heapq.heappop(self._returns)
            table = residents.tables[row]
            if table is not None and residents.num_uses[row] == num_uses and not residents.is_cold[row]:
                self.will_need(table)

    def _advance_hints(self) -> None:
        now_s = self._clock()
        for table, since_s in list(self._hints.items()):
            if table.closed or table.row == NO_ROW or now_s - since_s > HINT_LIVES_S:
                del self._hints[table]
            elif table not in self._hinting and not self._begin_hint(table):
                break

    def _begin_hint(self, table: PageTable) -> bool:
        """False: there is no room for it now."""
        pool = self._pool
        short = self._here_not(table) - pool.store.num_free + pool.low_water
        if short > 0:
            found = self._victims(table.pages)
            rows = pool.row_of[found]
            used_s = np.where(rows == NO_ROW, pool.last_use[found], self.residents.used_s(rows))
            found = found[self._clock() - used_s > UNUSED_S]
            if found.size < short or self._is_grace(found[:short], self._clock()):
                return False
            self._send_down(found[:short])
            if self._here_not(table) > pool.store.num_free:
                return False
        del self._hints[table]
        fork = self._hinting[table] = table.fork()  # nobody frees the pages meanwhile
        pages = fork.pages.copy()

        def over(error: SymError | None) -> None:
            if error is None:
                self._unpin(pages)
            self._hinting.pop(table).close()

        ticket = self._ticket(0, table.owner, pages, 0, lambda _: pool.pin(pages), over, lambda: self._unpin(pages))
        self._num_hints += 1
        self._admit(ticket)
        return True

    def _here_not(self, table: PageTable) -> int:
        return int(np.count_nonzero(self._pool.store.of[table.pages] == NOWHERE))

    # ---- a disk that does not answer

    def _begin_job(self) -> None:
        if not self._num_jobs:
            self._progress_s = self._clock()
        self._num_jobs += 1

    def _end_job(self) -> None:
        self._num_jobs -= 1
        self._progress_s = self._clock()

    def progressed(self) -> None:
        """A part of a job is done."""
        self._progress_s = self._clock()

    def _look_for_late(self) -> None:
        """Tickets that wait for jobs which do not end."""
        if self.mover is None or not self._num_jobs or self._clock() - self._progress_s < self.mover.deadline_s:
            return
        error = self.mover.late()
        waiting = {ticket for reading in self._reading.values() for ticket in reading.tickets}
        if self._going_down and self._waiting:
            waiting.add(self._waiting[0][1])
        for ticket in waiting:
            if not ticket.is_over:
                self._fail(ticket, error)

    # ---- figures

    def held(self) -> list[PageTable]:
        """What it refers to pages with, for the books."""
        return list(self._hinting.values())

    def statistics(self) -> TierStatistics:
        pool = self._pool
        here = pool.store.page_of[pool.store.page_of != NOWHERE]
        return TierStatistics(
            num_frames=pool.num_frames,
            num_free_frames=pool.store.num_free,
            num_computing=int(np.count_nonzero(pool.pins[here])),
            num_kept=int(np.count_nonzero(pool.keep_until[here] > self._clock())),
            num_on_disk_alone=pool.num_pages - pool.num_free - here.size,
            num_in=self._num_in,
            num_out=self._num_out,
            num_dropped=self._num_dropped,
            num_waiting=self.num_waiting,
            num_waits=self._num_waits,
            wait_s=self._wait_s,
            num_resumes=self._num_resumes,
            num_hidden=self._num_hidden,
            num_hints=self._num_hints,
            bring_s=self._bring_s,
            error="" if self._error is None else str(self._error),
        )


def _least_recent(files: Files, gaps: Gaps) -> FloatArray:
    """Until a policy is chosen."""
    del gaps
    return -files.idle_s


def _unknown(num_pages: FloatArray) -> FloatArray:
    return np.full_like(num_pages, np.nan)


def _nobody(num_frames: int, priority: int, waited_s: float) -> bool:
    del num_frames, priority, waited_s
    return False


_NONE: IntArray = np.empty(0, np.int32)
_NO_PLACES = np.zeros(0, np.bool_)
