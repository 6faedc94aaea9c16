"""Tickets of calls that wait for pages, and the protocols of the tiers: Mover, Engine, Pressure.

An engine and a pressure need a volume, which is built before them. So the volume gets functions that return the engine
and the pressure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvfs.pages.free_list import IntArray
from kvfs.pages.table import PageTable
from kvfs.tiers.policy import FloatArray
from libsym.errors import SymError

Then = Callable[[SymError | None], None]


class Mover(Protocol):
    """Moves pages between memory and disk, in jobs that end on the trio thread."""

    @property
    def deadline_s(self) -> float:
        """Seconds that the disk may take for the next part of a job. After that, the disk counts as not responding, and
        calls fail.
        """
        ...

    def bring_in(self, pages: IntArray, frames: IntArray, then: Then) -> None:
        """Read pages into frames. `then` is called when no job writes to the frames any longer."""
        ...

    def write_out(self, pages: IntArray, then: Then) -> None:
        """Write the computed entries of pages to disk. `then` is called when no job reads the pages any longer."""
        ...

    def late(self) -> SymError:
        """Return the error for a disk that does not respond."""
        ...


class Engine(Protocol):
    """Part of the scheduler that the pager uses. It makes calls leave the run, and tells how long recomputing takes."""

    def preempt(self, num_frames: int, user: int, priority: int, waited_s: float) -> bool:
        """Make calls leave the run, for a call of `user` that waits for frames. False: no call may be asked."""
        ...

    def idle_out(self) -> None:
        """Make programs that were idle for long leave the run, because memory is short. After that their files may be
        evicted.
        """
        ...

    def adopt(self, core: Any) -> None:
        """Take over the stay of a branch (`core` is its `core_table`), for which Python has objects from now on."""
        ...

    def compute_s(self, num_pages: FloatArray) -> FloatArray:
        """Return how many seconds it would take to compute files of these sizes again. NaN: unknown."""
        ...


class NoEngine:
    """An engine that computes nothing."""

    def preempt(self, num_frames: int, user: int, priority: int, waited_s: float) -> bool:
        del num_frames, user, priority, waited_s
        return False

    def idle_out(self) -> None:
        """Do nothing, because no program is in a run."""

    def adopt(self, core: Any) -> None:
        raise AssertionError(f"nobody computes with inode {core.number}")

    def compute_s(self, num_pages: FloatArray) -> FloatArray:
        return np.full_like(num_pages, np.nan)


class Pressure(Protocol):
    """Warns programs before their files are evicted."""

    def tell(self, tables: Sequence[PageTable], num_pages: int) -> float:
        """Tell programs that `num_pages` pages of these files are about to be evicted. Return the grace period in
        seconds.
        """
        ...


class NoPressure:
    """Pressure that warns no program."""

    def tell(self, tables: Sequence[PageTable], num_pages: int) -> float:
        del tables, num_pages
        return 0.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A call that waits for pages."""

    number: int
    priority: int
    user: int
    """The uid that pays in the end, even if the ticket is for a domain's pages."""
    owner: int
    """The account that is charged for the pages."""
    old_pages: IntArray
    """Existing pages that the call needs pinned in memory."""
    num_new: int
    """Number of frames for new pages."""
    admitted: Callable[[IntArray], None]
    """A function that gets frames for the new pages, and pins the ticket's pages."""
    unpin: Callable[[], None]
    over: Then
    """A function to call once all pages are pinned in memory. If it gets an error, no page is pinned."""
    since_s: float
    num_reading: int = 0
    """Number of reads that the ticket waits for."""
    is_admitted: bool = False
    is_over: bool = False
    is_cancelled: bool = False
    is_answer: bool = False
    """Whether the call answers pressure: it shrinks a file, which allocates pages before it frees any."""
    error: SymError | None = None

    @property
    def order(self) -> tuple[bool, int, int]:
        return not self.is_answer, -self.priority, self.number

    def end(self, error: SymError | None) -> None:
        """Fail or cancel a ticket, and unpin its pages. The caller then uses `tell`."""
        self.is_over = True
        self.error = error
        if self.is_admitted:
            self.unpin()

    def tell(self) -> None:
        """Tell the waiter how the ticket ended."""
        if not self.is_cancelled:
            self.over(None if self.error is None else copy(self.error))
