"""Changes of KV files that wait until nothing appends to the file: `truncate` from a shell, in its turn.

What appends to files is not known here. Who does know says when a file's turn has come (`Exclusive`); without it a
change is made at once, and is EBUSY where it can't be.

The kernel holds the inode's lock as long as a truncation waits: others who would change the file's size or mode can't
even be interrupted then. So the wait has an end, and a signal to whoever waits ends it at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import outcome
import trio

from kvfs.mount.eager import Eager
from kvfs.names.content import KvFile
from libsym.errors import Busy

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""A call on the file that takes longer than this is a long generation, and its program's to end."""


class Exclusive(Protocol):
    """Whoever appends to files."""

    def __call__(self, file: KvFile, action: Callable[[], None], /) -> None:
        """Call `action` when no earlier call on the file is in flight: before this returns, if none is."""


def at_once(_file: KvFile, action: Callable[[], None]) -> None:
    """Nobody appends."""
    action()


class Turns:
    """Waits for the turns of files. All of it on the trio thread."""

    def __init__(self, eager: Eager, exclusive: Exclusive, patience_s: float = PATIENCE_S) -> None:
        self._eager = eager
        self._exclusive = exclusive
        self._patience_s = patience_s

    async def change(self, kv: KvFile, what: object, function: Callable[[], None]) -> None:
        """Call a function when nothing else is being done to a file. Busy: its turn has not come, and will not."""
        turn = _Turn(function)
        self._exclusive(kv, turn.take)
        if turn.outcome is None:
            await self._eager.leave()
            try:
                with trio.move_on_after(self._patience_s):
                    await turn.over.wait()
            finally:
                turn.is_wanted = False
        if turn.outcome is None:
            text = "%s: a truncation has waited %g s for its turn in vain"
            log.info(text, what, self._patience_s, extra={"file": str(what)})
            raise Busy(f"{what}: calls have been appending to it for {self._patience_s:g} s; try again later")
        turn.outcome.unwrap()


class _Turn:
    """One change that waits."""

    __slots__ = ("_function", "is_wanted", "outcome", "over")

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.is_wanted = True
        """Whoever waited for it may have gone by then."""
        self.outcome: outcome.Outcome[None] | None = None
        self.over = trio.Event()

    def take(self) -> None:
        """The turn has come."""
        if self.is_wanted:
            self.outcome = outcome.capture(self._function)
            self.over.set()
