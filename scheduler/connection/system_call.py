"""A system call of a program, from its request to its answer.

A system call is answered once: by what its operation gives at once, or later, by what the operation left it to. Until
then CANCEL ends it, if it has said how (`when_cancelled`). A program that gives a call up does not look at the answer,
which may be on its way by then. So what it was given can be taken back, if the call says how behind its answer, until
`forget`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvfs.pages.holdings import Kind
from libsym.channel.server import Request
from libsym.errors import SymError, WouldBlock
from scheduler.connection.lip import Lip
from scheduler.connection.under_way import cost_of
from scheduler.replies import Reply

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SystemCall:
    """A request of a program, and what becomes of it. All of it on the trio thread."""

    lip: Lip
    request: Request
    is_answered: bool = False
    is_cancelled: bool = False
    _num_bytes: int = 0
    """Bytes that are counted while the call is under way."""
    _is_waiting: bool = False
    _tied_to: int = 0
    _cancel: Callable[[], None] | None = None

    def count_bytes(self) -> None:
        """Until it is answered. WouldBlock: it would be too much."""
        num_bytes = cost_of(self.request)
        self.lip.under_way.begin(num_bytes)
        self._num_bytes = num_bytes

    def check_may_wait(self, max_waiting: int) -> None:
        """WouldBlock, OverQuota: so many calls of the program wait already, or too many of the user."""
        if self.lip.num_later >= max_waiting:
            raise WouldBlock(f"{max_waiting} calls of this program wait already: let some of them end")
        self.lip.holdings.require(Kind.CALL)

    def wait(self, cancel: Callable[[], None]) -> None:
        """Let the call be answered when something has happened, or by `cancel`."""
        self._is_waiting = True
        self.lip.num_later += 1
        self.lip.holdings.charge(Kind.CALL)
        self.when_cancelled(cancel)

    def when_cancelled(self, cancel: Callable[[], None]) -> None:
        """From now on CANCEL does this. (Of two calls with one id, the program's own fault, the newer one's.)"""
        older = self.lip.calls.get(self.request.id)
        if older is not None and older is not self:
            older.forget()
        self._cancel = cancel
        self.lip.calls[self.request.id] = self

    def tie(self, handle: int) -> None:
        """While CANCEL may end it, what else is done to a handle may, too: see `Lip.tied`."""
        self._tied_to = handle
        self.lip.tied.setdefault(handle, set()).add(self)

    def forget(self) -> None:
        """CANCEL does nothing to it from now on. What it refers to is let go: some of that refers to the call."""
        self._cancel = None
        lip = self.lip
        if lip.calls.get(self.request.id) is self:
            del lip.calls[self.request.id]
        if self._tied_to:
            lip.untie(self._tied_to, self)
            self._tied_to = 0

    def again(self, request_id: int) -> SystemCall:
        """Return a later call of the same form."""
        return SystemCall(self.lip, self.request._replace(id=request_id))

    def cancel(self) -> None:
        """Once, and only if it has said how."""
        cancel = self._cancel
        self.is_cancelled = True
        self.forget()
        if cancel is not None:
            cancel()

    def answer(self, outcome: Reply | SymError) -> None:
        """The one answer."""
        self.drop()
        if isinstance(outcome, SymError):
            self.lip.channel.reply(self.request.id, error=outcome)
        else:
            self.lip.channel.reply(self.request.id, outcome.args, outcome.payload, num_rows=outcome.num_rows)

    def answer_by(self, function: Callable[[], Reply]) -> None:
        """Answer with what a function gives, or raises."""
        try:
            reply = function()
        except Exception as failure:  # noqa: BLE001 - reported by `fail`, which knows every kind
            self.fail(failure)
        else:
            self.answer(reply)

    def fail(self, failure: Exception) -> None:
        """Answer with an error; any other exception than ours is a fault of the daemon."""
        if isinstance(failure, SymError):
            self.answer(failure)
            return
        name = self.request.op.name
        log.error("%s of program %d failed", name, self.lip.pid, exc_info=failure, extra=self.lip.subject)
        self.answer(SymError(f"{name} failed inside the daemon: {failure!r}"))

    def send(self, args: tuple[int, ...], payload: bytes = b"") -> None:
        """A reply that others follow."""
        self.lip.channel.reply(self.request.id, args, payload, more=True)

    def drop(self) -> None:
        """End the call; the caller of this answers it, or nobody is there any more to be answered."""
        assert not self.is_answered, f"{self.request.op.name} of program {self.lip.pid} is answered twice"
        self.is_answered = True
        self.forget()
        if self._is_waiting:
            self.lip.num_later -= 1
            self.lip.holdings.let_go(Kind.CALL)
        if self._num_bytes:
            self.lip.under_way.end(self._num_bytes)
