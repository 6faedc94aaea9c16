"""The pager decides which pages are in memory: calls wait for theirs in order, and files worth least make room.

A *ticket* is somebody who needs pages: all of them at once, or none. While it waits it holds nothing, so tickets can't
wait for each other. Users take turns; among a user's tickets priority goes first. The first in order gets every frame
that becomes free, until it has as many as it needs. Then its pages are pinned, new ones get frames, what is on disk is
read, and the next in order has its turn. A ticket that has its frames waits for the disk alone. Frames become free in
four ways, tried in this order:

- pages that are on disk as they are lose their frame at once, and others when they are written, in the policy's order;
- programs in the run that think are asked to leave it;
- calls of the same user of a lower priority are, and then those that have been there for long (`Engine`);
- files are removed, and calls end, by themselves.

Where nothing of that is to be expected the first ticket fails: NoSpace, or what the disk said.

*Hints* want pages in memory that nobody needs yet. They come behind all tickets, and take nothing from files that are
needed sooner.

All of it on the trio thread; nothing here waits but `run`, and those who say so.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from copy import copy
from itertools import count
from typing import Any

import numpy as np
import trio

from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import NO_ROW, PagePool
from kvfs.pages.table import PageTable, Reservation
from kvfs.tiers.arrivals import Arrivals
from kvfs.tiers.departures import Departures
from kvfs.tiers.hints import WANTED_S, Hints
from kvfs.tiers.moves import Moves
from kvfs.tiers.residents import Residents
from kvfs.tiers.statistics import TierStatistics
from kvfs.tiers.tickets import Engine, Mover, NoEngine, NoPressure, Pressure, Then, Ticket
from kvfs.tiers.waiting import Waiting
from libsym.errors import Busy, NoSpace, SymError

LOW_WATER_SHARE = 64
"""Frames are kept free, one in so many, as long as pages may go down."""
LOOKS_EACH_S = 0.25
TURN_S = 2.0
"""Seconds of waiting after which a ticket comes before equals that have their pages."""
BUSY_AFTER_S = 30.0
"""Seconds that `put_on_disk` waits for a file that is being computed with."""


class Pager:
    """The memory of one pool."""

    def __init__(
        self,
        pool: PagePool,
        engine: Callable[[], Engine] = NoEngine,
        pressure: Callable[[], Pressure] = NoPressure,
        clock: Callable[[], float] = time.monotonic,
        see: Callable[[Any], PageTable] | None = None,
    ) -> None:
        """`see`: see `Residents`."""
        self._pool = pool
        self._engine = engine
        self.clock = clock
        self.residents = Residents(pool, clock, see)
        self._wake = pool.bell.ring
        self._moves = Moves(clock, self._wake)
        self.departures = Departures(pool, self.residents, self._moves, clock, self._expect, engine, pressure)
        self._arrivals = Arrivals(pool, self._moves, self._ended)
        self._hints = Hints(pool, self.residents, self.departures, self._moves, clock, self._read_for_hint)
        self._bringing: set[PageTable] = set()
        """Forks of files that somebody waits for."""
        self.progressed = self._moves.progressed
        self.num_preempted = 0
        """Calls that left the run for the sake of others' pages."""
        self._numbers = count()
        self._waiting = Waiting()
        self._due: list[Callable[[], None]] = []
        self._is_advancing = False
        self._num_waits = self._num_resumes = self._num_hidden = 0
        self._wait_s = 0.0

    def start(self, mover: Mover) -> None:
        """Pages may go down, and come back, from now on. Before that, what has no frame never gets one."""
        self._moves.mover = mover
        self._pool.core.low_water = max(1, self._pool.num_frames // LOW_WATER_SHARE)

    # ---- files

    def add(self, table: PageTable, priority: int = 0) -> None:
        """There is a new file."""
        self.residents.priority[self.residents.add(table)] = priority

    def filled(self, table: PageTable) -> None:
        """A new file got its pages without a call: by an import, or from others' entries. That was a use of them."""
        pages = table.pages
        own = pages[self._pool.row_of[pages] == NO_ROW]
        self._pool.row_of[own] = table.row
        self._pool.last_use[own] = self.clock()

    def remove(self, table: PageTable) -> None:
        """Forget a file that loses its last user; it still has its pages. Shared pages are its source's again."""
        if self.residents.pinned_until_s[table.row]:
            self.unpin_file(table)
        self._hints.forget(table)
        self.residents.remove(table)

    def opened(self, table: PageTable) -> None:
        """A program has it open."""
        assert table.row != NO_ROW
        self.residents.num_users[table.row] += 1

    def closed(self, table: PageTable) -> None:
        """A handle of the file was closed."""
        assert table.row != NO_ROW
        self.residents.num_users[table.row] -= 1

    def try_again(self) -> None:
        """The disk may take again what it refused just now."""
        self._moves.forget_error()
        self._wake()

    def forked(self, table: PageTable) -> None:
        """Count a fork as a use of the pages that the fork and its source share."""
        if table.row != NO_ROW:
            self.residents.begin_use(table.row)
            self.residents.end_use(table.row)

    def num_in_memory(self, table: PageTable) -> int:
        """Of its pages."""
        return int(np.count_nonzero(self._pool.store.of[table.pages] != NOWHERE))

    def tier_of(self, table: PageTable) -> str:
        """Where its pages are: `memory`, `disk`, or some here and some there: `mixed`."""
        num_here = self.num_in_memory(table)
        return "memory" if num_here == len(table.pages) else "mixed" if num_here else "disk"

    # ---- calls

    def acquire(self, reservation: Reservation, priority: int, then: Then) -> Ticket | None:
        """A call is to be computed. None: all its pages are in memory, and pinned now. Else `then` is told later,
        unless the ticket is given to `cancel`; NoSpace: they never will be.
        """
        table = reservation.table
        row, (file_is_there, all_is_there) = table.row, reservation.where()
        if row != NO_ROW:
            self._note_use(row, is_hidden=file_is_there)
        if all_is_there and not self._is_anybody_before(table, priority):
            reservation.ready()
            return None
        reservation.forget_frames()

        def admitted(frames: IntArray) -> None:
            reservation.give_frames(frames)
            reservation.ready()

        pages, num_new = reservation.needed(), reservation.num_new_pages
        num_old = pages.size - num_new
        ticket = self._ticket(priority, table.owner, pages[:num_old], num_new, admitted, reservation.unpin, then)
        self._num_waits += 1
        self._ask(ticket)
        return ticket

    def _is_anybody_before(self, table: PageTable, priority: int) -> bool:
        """Whether a call that has all its pages has to wait: who makes room does not take it back at once."""
        first = self._waiting.first()
        if first is None:
            return False
        has_waited = self.clock() - first.since_s > TURN_S
        if first.user != self._user_of(table.owner):
            return has_waited
        return first.priority > priority or (first.priority == priority and has_waited)

    def _user_of(self, owner: int) -> int:
        return self._pool.accounts.of(owner).numbers[0]

    def cancel(self, ticket: Ticket) -> None:
        """End a ticket that nobody waits for any more, and let go of what is pinned for it."""
        ticket.is_cancelled = True
        if not ticket.is_over:
            self._end(ticket, None)
            self._wake()

    def _note_use(self, row: int, *, is_hidden: bool) -> None:
        went_down = int(self.residents.went_down[row])
        gap_s = self.residents.begin_use(row)
        if went_down and gap_s > went_down * self._moves.bring_s:
            self._num_resumes += 1
            self._num_hidden += is_hidden

    def _expect(self, row: int) -> None:
        """A file goes down."""
        self._hints.expect(row)

    # ---- others that need pages

    async def room(self, num_pages: int, owner: int, priority: int = 0) -> IntArray:
        """Frames for new pages, for `PagePool.allocate`, or for `return_frames`. NoSpace: there will be none."""
        return await self._pinned(_NONE, num_pages, owner, priority)

    @asynccontextmanager
    async def hold(self, tables: Iterable[PageTable], priority: int = 0) -> AsyncIterator[None]:
        """Have all pages of files in memory, and keep them there. The caller sees to it that the files stay."""
        kept = list(tables)
        pages = np.unique(np.concatenate([_NONE, *(table.pages for table in kept)]))
        async with self.hold_pages(pages, 0, kept[0].owner if kept else 0, priority):
            yield

    @asynccontextmanager
    async def hold_pages(self, pages: IntArray, num_new: int, owner: int, priority: int = 0) -> AsyncIterator[IntArray]:
        """Have pages (none twice) in memory, and keep them there; and with them frames for new pages, as from `room`.

        All at once: two that each held some, and waited for more, could wait for each other for ever.
        """
        frames = await self._pinned(pages, num_new, owner, priority)
        try:
            yield frames
        finally:
            self._unpin(pages)

    async def _pinned(self, pages: IntArray, num_new: int, owner: int, priority: int) -> IntArray:
        """Pages, and frames for new ones: at once where all of it is there."""
        pool = self._pool
        is_free = num_new <= pool.num_free_frames
        if self._moves.mover is None and not is_free:
            raise NoSpace(
                f"memory is full: {num_new} pages wanted, {pool.num_free_frames} of {pool.num_frames} are free; remove "
                "files or forks, or start the daemon with more KV memory"
            )
        if is_free and (pool.store.of[pages] != NOWHERE).all():
            pool.pin(pages)
            return pool.take_frames(num_new)
        return await self._wait_for(pages, num_new, owner, priority)

    async def _wait_for(self, pages: IntArray, num_new: int, owner: int, priority: int) -> IntArray:
        is_over = trio.Event()
        frames: list[IntArray] = []

        def admitted(found: IntArray) -> None:
            self._pool.pin(pages)
            frames.append(found)
            self._pool.core.num_coming += found.size

        def over(_error: SymError | None) -> None:
            is_over.set()

        ticket = self._ticket(priority, owner, pages, num_new, admitted, lambda: self._unpin(pages), over)
        # What makes a file of others goes first then: behind who asks for the room, the grace would be over.
        ticket.is_answer = bool(pages.size and num_new) and self.departures.has_grace(owner)
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
        return frames[0]

    def _unpin(self, pages: IntArray) -> None:
        self._pool.unpin(pages)
        self._pool.last_use[pages] = self.clock()
        self._wake()

    # ---- advice

    def will_need(self, table: PageTable) -> None:
        """Take a hint: the file is worth having in memory soon."""
        if self._moves.mover is not None and table.row != NO_ROW:
            self._hints.add(table, self.clock() + WANTED_S)
            self._wake()

    def demote(self, table: PageTable) -> None:
        """Let a file go down, which is not worth memory before its next use. Pages that others used after it stay."""
        if self._moves.mover is None or table.row == NO_ROW:
            return
        self._hints.forget(table)
        self.residents.is_cold[table.row] = True
        self.residents.wanted_until_s[table.row] = 0
        pages, rows = table.pages, self._pool.row_of[table.pages]
        self.departures.send(self.departures.may_go(pages[(rows == table.row) | (rows == NO_ROW)]))

    async def put_on_disk(self, table: PageTable) -> None:
        """Return when no page of it is in memory. Busy: it is being computed with; NoSpace, EIO: the disk says so."""
        if self._moves.mover is None:
            raise NoSpace("nothing goes to disk here: the daemon keeps no state")
        self.demote(table)
        ends_s = self.clock() + BUSY_AFTER_S
        while self.num_in_memory(table):
            self.departures.send(self.departures.may_go(table.pages))
            if (error := self._moves.recent_error()) is not None and not self.departures.going:
                raise copy(error)
            if self._moves.is_late():
                raise self._moves.mover.late()
            if self.clock() > ends_s:
                raise Busy("the file is being computed with: try again when it is not")
            if self.num_in_memory(table):
                await trio.sleep(0.01)

    async def put_in_memory(self, table: PageTable) -> None:
        """Return when all of it is in memory; it stays there as long as it is worth it."""
        fork = table.fork()  # nobody frees the pages meanwhile
        self._bringing.add(fork)
        try:
            async with self.hold([fork]):
                if table.row != NO_ROW:
                    self.residents.wanted_until_s[table.row] = self.clock() + WANTED_S
                    self.residents.is_cold[table.row] = False
        finally:
            self._bringing.remove(fork)
            fork.close()

    def pin_file(self, table: PageTable, until_s: float) -> None:
        """Keep a file in memory until `until_s`. NoSpace: as much is kept by advice as may be."""
        assert table.row != NO_ROW
        pool, now_s = self._pool, self.clock()
        pages = table.pages
        num_others = pool.kept.num(now_s)
        num_more = int(np.count_nonzero(pool.kept.until[pages] <= now_s))
        may_be = self.departures.max_kept
        if num_others + num_more > may_be:
            raise NoSpace(
                f"{num_others} of {pool.num_frames} pages of memory are pinned, {num_more} more are wanted, and at "
                f"most {may_be} may be: unpin others, or have pin_share raised"
            )
        self.residents.pinned_until_s[table.row] = until_s
        pool.kept.extend(pages, until_s)
        self.will_need(table)

    def unpin_file(self, table: PageTable) -> None:
        """Let a pinned file go down again."""
        assert table.row != NO_ROW
        self.residents.pinned_until_s[table.row] = self.residents.wanted_until_s[table.row] = 0
        self._keep_anew(table.pages)
        self._wake()

    def was_cut(self, table: PageTable, gone: IntArray) -> None:
        """A file does not have these pages any more; others may."""
        if table.row != NO_ROW and self.residents.pinned_until_s[table.row]:
            self._keep_anew(gone)

    def _keep_anew(self, pages: IntArray) -> None:
        """Keep these pages only as long as files are pinned that have them."""
        residents = self.residents
        self._pool.kept.clear(pages)
        for row in np.flatnonzero(residents.pinned_until_s[: residents.num_rows] > self.clock()).tolist():
            other = residents.table_of(row)
            if other is not None:
                self._pool.kept.extend(other.pages, float(residents.pinned_until_s[row]))

    def num_kept(self, tables: Iterable[PageTable]) -> int:
        """Pages of these that advice keeps in memory."""
        pages = np.unique(np.concatenate([_NONE, *(table.pages for table in tables)]))
        return int(np.count_nonzero(self._pool.kept.until[pages] > self.clock()))

    # ---- tickets

    def _ticket(
        self,
        priority: int,
        owner: int,
        old_pages: IntArray,
        num_new: int,
        admitted: Callable[[IntArray], None],
        unpin: Callable[[], None],
        over: Then,
    ) -> Ticket:
        number, user, now_s = next(self._numbers), self._user_of(owner), self.clock()
        return Ticket(number, priority, user, owner, old_pages, num_new, admitted, unpin, over, now_s)

    def _ask(self, ticket: Ticket) -> None:
        self._waiting.add(ticket)
        self._wake()
        self._advance()

    def _read_for_hint(self, table: PageTable, over: Then) -> None:
        pages = table.pages.copy()

        def ended(error: SymError | None) -> None:
            if error is None:
                self._unpin(pages)
            over(error)

        def admitted(_: IntArray) -> None:
            self._pool.pin(pages)

        ticket = self._ticket(0, table.owner, pages, 0, admitted, lambda: self._unpin(pages), ended)
        self._arrivals.admit(ticket)

    def _end(self, ticket: Ticket, error: SymError | None) -> None:
        ticket.end(error)
        self._wait_s += self.clock() - ticket.since_s

    def _ended(self, ticket: Ticket, error: SymError | None) -> None:
        """End a ticket that has all its pages, or never gets them. `run` tells the waiter: others are in the middle of
        something.
        """
        if error is not None:
            self._end(ticket, error)
        else:
            ticket.is_over = True
            self._wait_s += self.clock() - ticket.since_s
        self._due.append(ticket.tell)
        self._wake()

    @property
    def num_waiting(self) -> int:
        """Tickets that have no frames yet."""
        return len(self._waiting)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """For ever."""
        task_status.started()
        while True:
            with trio.move_on_after(self._sleep_s()):
                await self._pool.bell.wait()
            due, self._due = self._due, []
            for function in due:
                function()
            self._hints.note_returns()
            self._look_for_late()
            self._advance()
            if self._moves.mover is not None and not self._waiting:
                self.departures.clean_ahead()
            self._pool.core.is_awaited = bool(self._waiting or self._hints)  # whatever is added from here on rings
            await trio.lowlevel.checkpoint()

    def _sleep_s(self) -> float:
        now_s = self.clock()
        until_s = self._hints.next_s
        if self.departures.grace_until_s > now_s:
            until_s = min(until_s, self.departures.grace_until_s)
        if self._waiting or self._hints or self._moves.num_jobs:
            until_s = min(until_s, now_s + LOOKS_EACH_S)
        return max(0.0, until_s - now_s)

    def _advance(self) -> None:
        """Give frames to those who are first."""
        if self._is_advancing or self._moves.mover is None:
            return
        self._is_advancing = True
        try:
            while (ticket := self._waiting.first()) is not None and self._try(ticket):
                pass
            if ticket is None:
                self._pool.core.num_promised = 0
                self._hints.advance()
                self.departures.keep_some_free()
        finally:
            self._is_advancing = False

    def _try(self, ticket: Ticket) -> bool:
        """The first in order has its frames, or fails. False: it has to wait."""
        pool, num_pages = self._pool, ticket.old_pages.size + ticket.num_new
        pool.core.num_promised = 0
        if num_pages > pool.num_frames:
            what = f"{num_pages} pages are needed in memory at once, and there is room for {pool.num_frames}"
            self._ended(ticket, NoSpace(f"{what}: start the daemon with more KV memory"))
            return True
        short = self._arrivals.num_frames_for(ticket) - pool.store.free.count
        if short > 0:
            self._make_room(short, ticket)
            if ticket.is_over:
                return True
            if self._arrivals.num_frames_for(ticket) > pool.store.free.count:
                pool.core.num_promised = pool.store.free.count
                return False
        self._waiting.served(ticket)
        self._arrivals.admit(ticket)
        return True

    def _make_room(self, num_frames: int, ticket: Ticket) -> None:
        """Have so many more frames free for whoever is first, now or soon; or it fails."""
        departures = self.departures
        wanted = num_frames - len(departures.going)
        if wanted <= 0:
            return
        taken = departures.victims(ticket.old_pages, wanted + self._pool.core.low_water)
        if not ticket.is_answer and departures.is_grace(taken):
            return
        num_frames -= departures.send(taken) + len(departures.going)
        if num_frames <= 0:
            return
        waited_s = self.clock() - ticket.since_s
        somebody_leaves = self._engine().preempt(num_frames, ticket.user, ticket.priority, waited_s)
        if somebody_leaves or departures.going or self._arrivals or self._is_anything_pinned():
            return
        self._ended(ticket, self._moves.recent_error() or self._no_room(num_frames))

    def _no_room(self, num_frames: int) -> NoSpace:
        num_kept = self._pool.kept.num(self.clock())
        return NoSpace(
            f"memory is full: {num_frames} pages more are needed there, {num_kept} of {self._pool.num_frames} are "
            "pinned by advice, and nothing else may go to disk: unpin files, remove some, or start the daemon with "
            "more KV memory"
        )

    def _is_anything_pinned(self) -> bool:
        """Whether somebody has pages in memory that will be let go."""
        return bool(self._pool.core.num_coming or self._pool.num_pinned)

    def _look_for_late(self) -> None:
        """Fail the tickets that wait for a disk that does not answer."""
        if not self._moves.is_late():
            return
        assert self._moves.mover is not None
        error = self._moves.mover.late()
        waiting = self._arrivals.waiting()
        if self.departures.going and (first := self._waiting.first()) is not None:
            waiting.add(first)
        for ticket in waiting:
            if not ticket.is_over:
                self._ended(ticket, error)

    # ---- figures

    def held(self) -> list[PageTable]:
        """Return the tables by which the pager refers to pages, for the books."""
        return [*self._hints.held(), *self._bringing]

    def statistics(self) -> TierStatistics:
        pool, moves = self._pool, self._moves
        return TierStatistics(
            num_frames=pool.num_frames,
            num_free_frames=pool.store.free.count,
            num_computing=pool.num_pinned,
            num_kept=pool.kept.num(self.clock()),
            num_on_disk_alone=pool.num_pages - pool.num_free - pool.num_in_memory,
            num_in=moves.num_in,
            num_out=moves.num_out,
            num_dropped=self.departures.num_dropped,
            num_waiting=self.num_waiting,
            num_waits=self._num_waits,
            wait_s=self._wait_s,
            num_resumes=self._num_resumes,
            num_hidden=self._num_hidden,
            num_hints=self._hints.num_begun,
            num_preempted=self.num_preempted,
            bring_s=moves.bring_s,
            error="" if moves.error is None else str(moves.error),
        )


_NONE: IntArray = np.empty(0, np.int32)
