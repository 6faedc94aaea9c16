"""Tickets of calls that wait for pages, and the doors of the tiers: who moves pages, who computes, who is told first.

The engine and those who are told need a volume themselves: it is given functions that return them, once they are made.
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
        """A call that waits longer than this without any job's end is told that the disk does not answer."""
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


class Engine(Protocol):
    """The engine computes with files, in calls that share a run."""

    def preempt(self, num_frames: int, user: int, priority: int, waited_s: float) -> bool:
        """A user who waits for so long needs so many: have some leave. False: there is nobody who may have to."""
        ...

    def idle_out(self) -> None:
        """Memory is short: have programs leave that think for long, so that their files may go down."""
        ...

    def adopt(self, core: Any) -> None:
        """Take over what the core computes with a branch, a `core_table`: it has objects from now on."""
        ...

    def compute_s(self, num_pages: FloatArray) -> FloatArray:
        """Return the seconds that computing files of so many pages each would take; not a number: unknown."""
        ...


class NoEngine:
    """An engine that computes nothing."""

    def preempt(self, num_frames: int, user: int, priority: int, waited_s: float) -> bool:
        del num_frames, user, priority, waited_s
        return False

    def idle_out(self) -> None:
        """No program thinks."""

    def adopt(self, core: Any) -> None:
        raise AssertionError(f"nobody computes with inode {core.number}")

    def compute_s(self, num_pages: FloatArray) -> FloatArray:
        return np.full_like(num_pages, np.nan)


class Pressure(Protocol):
    """Programs are told before files go down."""

    def tell(self, tables: Sequence[PageTable], num_pages: int) -> float:
        """Return the seconds that programs have to do something, when so many pages of these are about to go."""
        ...


class NoPressure:
    """Pressure that no program hears of."""

    def tell(self, tables: Sequence[PageTable], num_pages: int) -> float:
        del tables, num_pages
        return 0.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A call that waits for pages."""

    number: int
    priority: int
    user: int
    """The uid of the waiter, whatever the domain."""
    owner: int
    """The account whose pages they are."""
    old_pages: IntArray
    """Pages that are to be in memory, and pinned."""
    num_new: int
    """Frames for pages that hold nothing yet."""
    admitted: Callable[[IntArray], None]
    """Called with frames for the new pages, to pin its pages."""
    unpin: Callable[[], None]
    over: Then
    """Called when all is there; or with an error, and nothing is pinned."""
    since_s: float
    num_reading: int = 0
    """Reads that it waits for."""
    is_admitted: bool = False
    is_over: bool = False
    is_cancelled: bool = False
    is_answer: bool = False
    """Of an account that was told of pressure: it shrinks a file, which takes room before it gives some back."""
    error: SymError | None = None

    @property
    def order(self) -> tuple[bool, int, int]:
        return not self.is_answer, -self.priority, self.number

    def end(self, error: SymError | None) -> None:
        """Give a ticket nothing, and take back what it has. `tell` is to follow."""
        self.is_over = True
        self.error = error
        if self.is_admitted:
            self.unpin()

    def tell(self) -> None:
        """Tell the waiter how the ticket ended."""
        if not self.is_cancelled:
            self.over(None if self.error is None else copy(self.error))
