"""Moves of pages between memory and disk: the jobs under way, the time that reads take, and the disk's last error."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvfs.pages.free_list import IntArray
from kvfs.tiers.tickets import Mover, Then
from libsym.errors import SymError

log = logging.getLogger(__name__)

FIRST_BRING_S = 1e-3
"""Assumed time to read a page, until the first read ends."""
_NEWS_SHARE = 0.2
ERROR_LIVES_S = 1.0
SAYS_EACH_S = 60.0


class Moves:
    """The moves of one pool. `mover` is set once the storage runs. Before that no page moves."""

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock = clock
        self._wake = wake
        self.mover: Mover | None = None
        self.bring_s = FIRST_BRING_S
        """Recent average time to read a page."""
        self.num_jobs = 0
        self.num_in = self.num_out = 0
        """Pages read, and pages written."""
        self.error: SymError | None = None
        """The error of the last write. None: the write succeeded."""
        self._error_at_s = self._said_at_s = -1e9
        self._progress_s = clock()  # when the last part of a job ended, or the oldest job under way began

    def bring_in(self, pages: IntArray, frames: IntArray, then: Then) -> None:
        """Read pages from disk as `Mover.bring_in` does, and measure the time."""
        began_s = self._begin()

        def ended(error: SymError | None) -> None:
            self._end()
            if error is None:
                self.num_in += pages.size
                took_s = (self._clock() - began_s) / pages.size
                self.bring_s += _NEWS_SHARE * (took_s - self.bring_s)
            then(error)

        assert self.mover is not None
        self.mover.bring_in(pages, frames, ended)

    def write_out(self, pages: IntArray, then: Then) -> None:
        """Write pages to disk as `Mover.write_out` does, and note an error."""
        self._begin()

        def ended(error: SymError | None) -> None:
            self._end()
            if error is None:
                self.error = None
                self.num_out += pages.size
            else:
                self._note(error)
            then(error)

        assert self.mover is not None
        self.mover.write_out(pages, ended)

    def progressed(self) -> None:
        """Note that a part of a job ended: the disk responds."""
        self._progress_s = self._clock()

    def is_late(self) -> bool:
        """Return whether the disk has not responded for longer than its deadline."""
        if self.mover is None or not self.num_jobs:
            return False
        return self._clock() - self._progress_s >= self.mover.deadline_s

    def forget_error(self) -> None:
        """Forget the last error, because something has changed since."""
        self.error = None

    def recent_error(self) -> SymError | None:
        """Return the disk's error of the last second, so that callers need not try again. None: no error occurred."""
        return self.error if self._clock() - self._error_at_s < ERROR_LIVES_S else None

    def _begin(self) -> float:
        now_s = self._clock()
        if not self.num_jobs:
            self._progress_s = now_s
        self.num_jobs += 1
        return now_s

    def _end(self) -> None:
        self.num_jobs -= 1
        self._progress_s = self._clock()
        self._wake()

    def _note(self, error: SymError) -> None:
        now_s = self._clock()
        if now_s - self._said_at_s > SAYS_EACH_S:
            log.error("pages can't go to disk: %s", error)
            self._said_at_s = now_s
        self.error, self._error_at_s = error, now_s
