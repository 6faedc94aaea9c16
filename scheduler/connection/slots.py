"""Result slots for calls of one program: given out immediately while some are free, otherwise in the calls' order.

A slot of a call in flight is freed or passes to the program, however long the call's step takes. But the program may
hold all slots that are not free. Then only the program can free one, and the program may be waiting for this very call.
So a wait ends with NoBuffers when no slot was given out, answered or freed for PATIENCE_S. The client rings when it
frees slots; the listener calls `serve()` then, and at `deadline`. The run answers decode loops without calling this
object, which notices the slots of these answers only at its next look. So NoBuffers may come up to PATIENCE_S late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from libsym.channel.server import ServerChannel
from libsym.errors import NoBuffers, SymError

PATIENCE_S = 1.0
"""Longest wait while the program holds every slot, and no slot is given out, answered or freed. Even a slow program
reads its rows in some milliseconds. Without this limit, a program that keeps all its rows would make the call wait for
ever.
"""

Then = Callable[[int | SymError], None]
"""Function that gets the first of the slots, or the error if the wait has failed."""


@dataclass(slots=True, eq=False)
class _Wait:
    num_rows: int
    then: Then
    is_wanted: Callable[[], bool]


class Slots:
    """Result slots of one connection, on the trio thread. `then` may call methods of this object."""

    def __init__(self, channel: ServerChannel, core: Any) -> None:
        """`core`: the `sym_connection`. While calls wait for slots, the core carries out no call that needs slots."""
        self._channel = channel
        self._core = core
        self._waits: deque[_Wait] = deque()
        self._seen = (0, 0, 0)
        self.deadline = math.inf
        """Latest time of the next `serve()`, in trio's time."""

    def take_now(self, num_rows: int) -> int | None:
        """Return the first of `num_rows` slots. None: the call has to wait."""
        found = None if self._waits else self._find(num_rows)
        if isinstance(found, SymError):
            raise found
        return found

    def wait(self, num_rows: int, then: Then, is_wanted: Callable[[], bool]) -> None:
        """Queue for `num_rows` slots. `then` gets the first slot, or the error.

        If `is_wanted` has become false, the next `serve()` drops the wait without calling `then`.
        """
        self._waits.append(_Wait(num_rows, then, is_wanted))
        self._core.waits_for_slots = True
        if len(self._waits) == 1:
            self.deadline = trio.current_time() + PATIENCE_S
            self.serve()

    def serve(self) -> None:
        """Give out slots that have become free, and fail waits that have lasted too long."""
        if not self._waits:
            return
        self._channel.want_slots()  # first, so that the client rings for each slot that it frees from now on
        self._give_out()
        if self._have_moved():
            self.deadline = trio.current_time() + PATIENCE_S
        while self._waits and trio.current_time() >= self.deadline:
            self._give_up_first()
            self._give_out()  # later waits may need fewer slots
            if self._have_moved():
                self.deadline = trio.current_time() + PATIENCE_S
        if not self._waits:
            self.drop()

    def _give_out(self) -> None:
        while self._waits:
            wait = self._waits[0]
            if not wait.is_wanted():
                self._waits.popleft()
                continue
            found = self._find(wait.num_rows)
            if found is None:
                break
            self._waits.popleft()
            wait.then(found)

    def drop(self) -> None:
        """Stop waiting for slots, because no wait is left, or because the program has gone. Forget all waits."""
        self._waits.clear()
        self._core.waits_for_slots = False
        self.deadline = math.inf

    def _find(self, num_rows: int) -> int | SymError | None:
        try:
            return self._channel.take_rows(num_rows)
        except NoBuffers:
            return None
        except SymError as error:
            return error

    def _have_moved(self) -> bool:
        """Return whether slots were given out, answered or freed since the last look, or whether calls in flight have
        slots.
        """
        channel = self._channel
        before, self._seen = self._seen, (channel.num_lent_slots, channel.num_given_slots, channel.num_held_slots)
        return self._seen[0] > 0 or self._seen != before

    def _give_up_first(self) -> None:
        wait = self._waits.popleft()
        wait.then(
            NoBuffers(
                f"no {wait.num_rows} of the connection's {self._channel.num_slots} result slots became free in "
                f"{PATIENCE_S:g} s: drop some Dists first, or ask for top_k"
            )
        )
