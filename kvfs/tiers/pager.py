"""The pager decides which pages are in memory: calls wait for pages in order, and the least valuable files are evicted.

A *ticket* stands for a call or another user of pages. A ticket needs all its pages together. A waiting ticket holds
nothing, so tickets can't wait for each other. Users take turns, and of one user's tickets the ticket with the highest
priority is served first. The first ticket gets every frame that becomes free, until it has enough. Then its pages are
pinned, its new pages get frames, its pages on disk are read, and the next ticket becomes the first. A ticket that has
its frames waits only for the disk. Frames become free in four ways, tried in this order:

- pages in the policy's order are evicted: clean pages at once, dirty pages after they are written;
- idle programs in the run are asked to leave the run;
- calls of the same user with a lower priority leave the run, then calls that have been in the run for long (`Engine`);
- programs remove files, and calls end.

If none of these four can be expected, the first ticket fails with NoSpace, or with the disk's error.

*Hints* are for pages that no call needs yet. Hints are served after all tickets, and evict no file that will be used
sooner.

All of this runs on the trio thread. Only `run` and coroutines wait.
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
"""While pages may go to disk, one frame in this many is kept free."""
LOOKS_EACH_S = 0.25
PRECEDES_AFTER_S = 2.0
"""Seconds of waiting after which a ticket precedes calls of the same priority whose pages are in memory."""
BUSY_AFTER_S = 30.0
"""Seconds for which `put_on_disk` waits until no call computes with the file."""


class Pager:
    """Decides which pages of one pool are in memory."""

    def __init__(
        self,
        pool: PagePool,
        engine: Callable[[], Engine] = NoEngine,
        pressure: Callable[[], Pressure] = NoPressure,
        clock: Callable[[], float] = time.monotonic,
        see: Callable[[Any], PageTable] | None = None,
    ) -> None:
        """`see`: as in `Residents`."""
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
        """Forks that keep pages alive while `put_in_memory` reads them."""
        self.progressed = self._moves.progressed
        self.num_preempted = 0
        """Calls that left the run so that other calls get memory."""
        self._numbers = count()
        self._waiting = Waiting()
        self._due: list[Callable[[], None]] = []
        self._is_advancing = False
        self._num_waits = self._num_resumes = self._num_hidden = 0
        self._wait_s = 0.0

    def start(self, mover: Mover) -> None:
        """Begin to move pages between memory and disk. Before that, a page without a frame never gets one."""
        self._moves.mover = mover
        self._pool.core.low_water = max(1, self._pool.num_frames // LOW_WATER_SHARE)

    # ---- files

    def add(self, table: PageTable, priority: int = 0) -> None:
        """Give a new file a row."""
        self.residents.priority[self.residents.add(table)] = priority

    def filled(self, table: PageTable) -> None:
        """Note that a new file got its pages by an import, or from entries of other files. This counts as a use of the
        pages.
        """
        pages = table.pages
        own = pages[self._pool.row_of[pages] == NO_ROW]
        self._pool.row_of[own] = table.row
        self._pool.last_use[own] = self.clock()

    def remove(self, table: PageTable) -> None:
        """Forget a file that loses its last user. The file's table still has its pages. The file's source inherits
        shared pages.
        """
        if self.residents.pinned_until_s[table.row]:
            self.unpin_file(table)
        self._hints.forget(table)
        self.residents.remove(table)

    def opened(self, table: PageTable) -> None:
        """Note that a program has opened a file."""
        assert table.row != NO_ROW
        self.residents.num_users[table.row] += 1

    def closed(self, table: PageTable) -> None:
        """Note that a handle of a file was closed."""
        assert table.row != NO_ROW
        self.residents.num_users[table.row] -= 1

    def try_again(self) -> None:
        """Retry writes that the disk has refused, because something has changed."""
        self._moves.forget_error()
        self._wake()

    def forked(self, table: PageTable) -> None:
        """Count a fork as a use of the pages that the fork and its source share."""
        if table.row != NO_ROW:
            self.residents.begin_use(table.row)
            self.residents.end_use(table.row)

    def num_in_memory(self, table: PageTable) -> int:
        """Return how many pages of a file are in memory."""
        return int(np.count_nonzero(self._pool.store.of[table.pages] != NOWHERE))

    def tier_of(self, table: PageTable) -> str:
        """Tell where a file's pages are: `memory`, `disk`, or `mixed`."""
        num_here = self.num_in_memory(table)
        return "memory" if num_here == len(table.pages) else "mixed" if num_here else "disk"

    # ---- calls

    def acquire(self, reservation: Reservation, priority: int, then: Then) -> Ticket | None:
        """Get memory for a call. None: all its pages are in memory, and pinned now. Otherwise `then` is called later,
        unless the ticket is cancelled. `then` gets NoSpace if enough memory can't become free.
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
        """Return whether a call with all its pages in memory has to wait. A call that left the run for a ticket must
        not take its memory back at once.
        """
        first = self._waiting.first()
        if first is None:
            return False
        has_waited = self.clock() - first.since_s > PRECEDES_AFTER_S
        if first.user != self._user_of(table.owner):
            return has_waited
        return first.priority > priority or (first.priority == priority and has_waited)

    def _user_of(self, owner: int) -> int:
        return self._pool.accounts.of(owner).numbers[0]

    def cancel(self, ticket: Ticket) -> None:
        """End a ticket that is no longer needed, and unpin its pages."""
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
        """Plan a hint for the next use of a file that is being evicted."""
        self._hints.expect(row)

    # ---- other users of pages

    async def room(self, num_pages: int, owner: int, priority: int = 0) -> IntArray:
        """Return frames for new pages, to give to `PagePool.allocate` or `return_frames`. NoSpace: enough frames can't
        become free.
        """
        return await self._pinned(_NONE, num_pages, owner, priority)

    @asynccontextmanager
    async def hold(self, tables: Iterable[PageTable], priority: int = 0) -> AsyncIterator[None]:
        """Read all pages of files into memory, and pin them. The caller keeps the files open."""
        kept = list(tables)
        pages = np.unique(np.concatenate([_NONE, *(table.pages for table in kept)]))
        async with self.hold_pages(pages, 0, kept[0].owner if kept else 0, priority):
            yield

    @asynccontextmanager
    async def hold_pages(self, pages: IntArray, num_new: int, owner: int, priority: int = 0) -> AsyncIterator[IntArray]:
        """Read pages into memory and pin them. Return frames for `num_new` new pages, as `room` does. No page is named
        twice.

        The caller gets all pages and frames together. Two callers that held some frames, and waited for more, could
        wait for each other for ever.
        """
        frames = await self._pinned(pages, num_new, owner, priority)
        try:
            yield frames
        finally:
            self._unpin(pages)

    async def _pinned(self, pages: IntArray, num_new: int, owner: int, priority: int) -> IntArray:
        """Pin the pages and return frames for new pages, without a wait if there is memory."""
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
        # An extract or a merge may be a program's answer to pressure, so it goes first. If it queued behind the calls
        # that need memory, the grace period would end first.
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
        """Note a hint: the file will be needed in memory soon."""
        if self._moves.mover is not None and table.row != NO_ROW:
            self._hints.add(table, self.clock() + WANTED_S)
            self._wake()

    def demote(self, table: PageTable) -> None:
        """Evict a file that is not worth its memory until its next use. A shared page stays in memory if another file
        used the page last.
        """
        if self._moves.mover is None or table.row == NO_ROW:
            return
        self._hints.forget(table)
        self.residents.is_cold[table.row] = True
        self.residents.wanted_until_s[table.row] = 0
        pages, rows = table.pages, self._pool.row_of[table.pages]
        self.departures.send(self.departures.may_go(pages[(rows == table.row) | (rows == NO_ROW)]))

    async def put_on_disk(self, table: PageTable) -> None:
        """Return when no page of the file is in memory. Busy: calls compute with it. NoSpace, EIO: the disk failed."""
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
        """Return when the whole file is in memory. From then on the policy decides whether it stays."""
        fork = table.fork()  # keeps the pages referenced
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
        """Keep a file in memory until `until_s`. NoSpace: the limit of pages that advice may keep is reached."""
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
        """End the pin of a file, so that it may be evicted again."""
        assert table.row != NO_ROW
        self.residents.pinned_until_s[table.row] = self.residents.wanted_until_s[table.row] = 0
        self._keep_anew(table.pages)
        self._wake()

    def was_cut(self, table: PageTable, gone: IntArray) -> None:
        """Drop pins on pages that a file no longer has, unless other files pin them."""
        if table.row != NO_ROW and self.residents.pinned_until_s[table.row]:
            self._keep_anew(gone)

    def _keep_anew(self, pages: IntArray) -> None:
        """Keep each of these pages in memory until the last pin of a file that has the page ends."""
        residents = self.residents
        self._pool.kept.clear(pages)
        for row in np.flatnonzero(residents.pinned_until_s[: residents.num_rows] > self.clock()).tolist():
            other = residents.table_of(row)
            if other is not None:
                self._pool.kept.extend(other.pages, float(residents.pinned_until_s[row]))

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
        """End a ticket that has all its pages, or will never get them. `run` calls the waiter, since the code that
        calls this function is in the middle of a change.
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
        """Serve waiting tickets and move pages, for ever."""
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
            self._pool.core.is_awaited = bool(self._waiting or self._hints)  # from here on, new tickets ring the bell
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
        """Give frames to the first tickets in order."""
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
        """Give the first ticket its frames, or fail it. False: it has to wait."""
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
        """Make `num_frames` more frames free for the first ticket, now or soon; or fail the ticket."""
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
        """Return whether pages in memory are pinned or being read, so that frames will become free later."""
        return bool(self._pool.core.num_coming or self._pool.num_pinned)

    def _look_for_late(self) -> None:
        """Fail the tickets that wait for a disk that does not respond."""
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
        """Return the tables that refer to pages for the pager, for the audit."""
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
