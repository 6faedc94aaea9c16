"""Changes of KV files that wait until no call appends to the file. An example is `truncate` from a shell.

This module does not know which calls append to files. An `Exclusive` runs a change when no call appends to the file.
The default `at_once` runs a change immediately. A change that can't be made then fails with EBUSY.

While a truncation waits, the kernel holds the inode's lock. Other programs that change the file's size or mode wait for
that lock, and no signal interrupts them. So the truncation's wait has a limit, and a signal to the truncating program
ends the wait at once.
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
"""Time that a change waits. A call that takes longer is a long generation, which only its program should end."""


class Exclusive(Protocol):
    """Function that runs an action when no call appends to a file. The engine, which makes the appends, provides this
    function.
    """

    def __call__(self, file: KvFile, action: Callable[[], None], /) -> None:
        """Call `action` when no earlier call on the file is in flight. If no call is in flight now, call `action`
        before this function returns.
        """


def at_once(_file: KvFile, action: Callable[[], None]) -> None:
    """Call `action` now. This is the `Exclusive` of a mount without an engine."""
    action()


class WaitingChanges:
    """Changes that wait until no call appends to their files. All changes run on the trio thread."""

    def __init__(self, eager: Eager, exclusive: Exclusive, patience_s: float = PATIENCE_S) -> None:
        self._eager = eager
        self._exclusive = exclusive
        self._patience_s = patience_s

    async def change(self, kv: KvFile, what: object, function: Callable[[], None]) -> None:
        """Call a function when no call appends to the file. Raise Busy if other calls have not ended in time."""
        change = _Change(function)
        self._exclusive(kv, change.make)
        if change.outcome is None:
            await self._eager.leave()
            try:
                with trio.move_on_after(self._patience_s):
                    await change.over.wait()
            finally:
                change.is_wanted = False
        if change.outcome is None:
            text = "%s: a truncation has waited %g s in vain"
            log.info(text, what, self._patience_s, extra={"file": str(what)})
            raise Busy(f"{what}: calls have been appending to it for {self._patience_s:g} s; try again later")
        change.outcome.unwrap()


class _Change:
    """A change that waits, or was made."""

    __slots__ = ("_function", "is_wanted", "outcome", "over")

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.is_wanted = True
        """Whether the request still waits for the change."""
        self.outcome: outcome.Outcome[None] | None = None
        self.over = trio.Event()

    def make(self) -> None:
        """Make the change if it is still wanted. No call appends to the file now."""
        if self.is_wanted:
            self.outcome = outcome.capture(self._function)
            self.over.set()
