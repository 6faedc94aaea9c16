"""One step of the decoder: the next entries of some calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from decoder.batch import StepBatch
from kvfs.pages.store import PageStore
from scheduler.batch.call import FileCall, Rows
from scheduler.batch.scratch import Scratch


class StepRunner(Protocol):
    """What the scheduler needs of a decoder."""

    def step(self, batch: StepBatch) -> None: ...


class Step:
    """As planned: so many entries of each call."""

    def __init__(self, plan: Sequence[tuple[FileCall, int]], scratch: Scratch) -> None:
        copies: list[tuple[int, int]] = []
        self._stale: list[int] = []
        for call, num_now in plan:
            call.is_running = True
            assert call.reservation is not None
            self._stale += call.reservation.pages_to_zero(call.num_done + num_now)
            if call.num_done == 0:
                copies += call.reservation.frame_copies()
        rows = _shares(plan, scratch)
        chunks = [call.chunk(num_now, share) for (call, num_now), share in zip(plan, rows, strict=True)]
        self._batch = StepBatch(tuple(chunks), tuple(copies))
        self._digests = [(call, share) for (call, _), share in zip(plan, rows, strict=True) if share]

    def compute(self, decoder: StepRunner, pages: PageStore) -> None:
        """In the step's thread."""
        for page in self._stale:
            pages.zero(page)
        decoder.step(self._batch)
        for call, rows in self._digests:
            call.digest(len(call.tokens) - 1 if call.num_digested == 1 else call.num_done, rows)


def _shares(plan: Sequence[tuple[FileCall, int]], scratch: Scratch) -> list[Rows]:
    """Of scratch: for each call the rows that it digests."""
    counts = [call.num_scratch(num_now) for call, num_now in plan]
    rows = iter(scratch.rows(sum(counts)))
    return [list(islice(rows, count)) for count in counts]
