"""Result slots for the calls of one program: at once while there are some, then in order, as it lets go of rows.

A slot that a call under way has becomes free, or the program's, however long its step takes. Once all that are not free
are the program's, it alone could free one, and it may be waiting for this very call. So from then on a wait has an end:
NoBuffers when no slot has moved for PATIENCE_S. The client rings when it frees some, and the listener calls `serve()`,
at `deadline` too. The run answers calls of decode loops without a word to this side, which sees it at the next look: so
the end may come up to PATIENCE_S late.
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
"""With every slot the program's, and none given out or freed. A loop that is slow to look at its rows takes
milliseconds; one that holds them all would wait for ever."""

Then = Callable[[int | SymError], None]
"""Is told the first slot, or why there is none."""


@dataclass(slots=True, eq=False)
class _Wait:
    num_rows: int
    then: Then
    is_wanted: Callable[[], bool]


class Slots:
    """Gives out the slots of one connection. All of it on the trio thread; `then` may call back into it."""

    def __init__(self, channel: ServerChannel, core: Any) -> None:
        """`core`: the `sym_connection`, which carries out no call that needs slots while others wait for some."""
        self._channel = channel
        self._core = core
        self._waits: deque[_Wait] = deque()
        self._seen = (0, 0, 0)
        self.deadline = math.inf
        """When `serve()` is due at the latest, in trio's time."""

    @property
    def num_waiting(self) -> int:
        """Calls that wait for slots."""
        return len(self._waits)

    def take_now(self, num_rows: int) -> int | None:
        """The first of `num_rows` slots; None: it takes a wait."""
        found = None if self._waits else self._find(num_rows)
        if isinstance(found, SymError):
            raise found
        return found

    def wait(self, num_rows: int, then: Then, is_wanted: Callable[[], bool]) -> None:
        """Tell `then` the first of `num_rows` slots when its turn has come, or why there are none.

        When `is_wanted` has become false the wait is over without a word, at the next `serve()`.
        """
        self._waits.append(_Wait(num_rows, then, is_wanted))
        self._core.waits_for_slots = True
        if len(self._waits) == 1:
            self.deadline = trio.current_time() + PATIENCE_S
            self.serve()

    def serve(self) -> None:
        """Slots may have become free, or time has passed."""
        if not self._waits:
            return
        self._channel.want_slots()  # first: what is freed after the look below rings
        self._give_out()
        if self._have_moved():
            self.deadline = trio.current_time() + PATIENCE_S
        while self._waits and trio.current_time() >= self.deadline:
            self._give_up_first()
            self._give_out()  # those behind it may want fewer
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
        """Forget all waits: there is none, or the program has gone."""
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
        """Whether a slot was given out, answered or freed since the last look, or a call under way will do so."""
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
