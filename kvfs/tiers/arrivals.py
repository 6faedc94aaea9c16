"""Reads of pages from disk for tickets. A page that several tickets need is read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import PagePool
from kvfs.tiers.moves import Moves
from kvfs.tiers.tickets import Ticket
from libsym.errors import SymError


@dataclass(slots=True, eq=False)
class _Reading:
    """A read of pages into frames that is under way."""

    pages: IntArray
    frames: IntArray
    generations: IntArray
    asked: Ticket
    """The ticket that needs all of these pages."""
    tickets: list[Ticket] = field(default_factory=list)
    """Tickets that wait for these pages. Tickets other than `asked` may need only some of the pages."""


class Arrivals:
    """The reads of one pool. `over` is called for each ticket when all its pages are in memory, or with an error."""

    def __init__(self, pool: PagePool, moves: Moves, over: Callable[[Ticket, SymError | None], None]) -> None:
        self._pool = pool
        self._moves = moves
        self._over = over
        self._reading: dict[int, _Reading] = {}  # by page number

    def __len__(self) -> int:
        return len(self._reading)

    def num_frames_for(self, ticket: Ticket) -> int:
        """Return how many free frames a ticket needs."""
        return self._to_read(ticket).size + ticket.num_new

    def admit(self, ticket: Ticket) -> None:
        """Admit a ticket that has enough free frames: take frames for its new pages, and read its missing pages."""
        ticket.admitted(self._pool.store.free.take(ticket.num_new))
        ticket.is_admitted = True
        self._read_missing(ticket)
        if not ticket.num_reading:
            self._over(ticket, None)

    def waiting(self) -> set[Ticket]:
        """Return the tickets that wait for reads."""
        return {ticket for reading in self._reading.values() for ticket in reading.tickets}

    def _to_read(self, ticket: Ticket) -> IntArray:
        """Return the ticket's missing pages that no read under way covers."""
        missing: IntArray = ticket.old_pages[self._pool.store.of[ticket.old_pages] == NOWHERE]
        if not self._reading:
            return missing
        return np.array([page for page in missing.tolist() if page not in self._reading], np.int32)

    def _read_missing(self, ticket: Ticket) -> None:
        """Have a ticket wait for its missing pages, and begin the reads that are not under way yet."""
        to_read = self._to_read(ticket)
        if to_read.size:
            self._read(to_read, ticket)
        missing = ticket.old_pages[self._pool.store.of[ticket.old_pages] == NOWHERE]
        for reading in dict.fromkeys(self._reading[page] for page in missing.tolist()):
            if ticket not in reading.tickets:
                reading.tickets.append(ticket)
                ticket.num_reading += 1

    def _read(self, pages: IntArray, asked: Ticket) -> None:
        pool = self._pool
        reading = _Reading(pages, pool.take_frames(pages.size), pool.on_disk.generation[pages], asked)
        self._reading |= dict.fromkeys(pages.tolist(), reading)
        self._moves.bring_in(pages, reading.frames, lambda error: self._is_read(reading, error))

    def _is_read(self, reading: _Reading, error: SymError | None) -> None:
        """Finish a read. Tickets may have ended, and pages may have been freed, in the meantime."""
        pool, pages, frames = self._pool, reading.pages, reading.frames
        for page in pages.tolist():
            del self._reading[page]
        if error is not None:
            pool.return_frames(frames)
        else:
            stays = (pool.on_disk.generation[pages] == reading.generations) & (pool.refcount[pages] > 0)
            pool.end_bringing(pages[stays], frames[stays], reading.asked.owner)
            pool.return_frames(frames[~stays])
        for ticket in reading.tickets:
            ticket.num_reading -= 1
            if ticket.is_over:
                continue
            if error is not None and ticket is reading.asked:
                self._over(ticket, error)
                continue
            # The error may concern a page that this ticket does not need. Or a page number was freed and reused during
            # the read. In both cases the frames of the read are free again, so the missing pages can be read once more.
            self._read_missing(ticket)
            if not ticket.num_reading:
                self._over(ticket, None)
