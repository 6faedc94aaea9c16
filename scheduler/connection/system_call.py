"""A system call of a program, from its request to its answer.

A system call is answered exactly once: immediately by its operation, or later by the code that completes the call.
Until then CANCEL ends the call if the operation has set `when_cancelled`. A program that gives up a call ignores its
answer, which may already be on its way. So an operation can set a cancel function even after the answer. Until
`forget`, CANCEL then takes the result back.
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
from scheduler.wire.replies import Reply

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SystemCall:
    """System call: a request of a program, up to its last reply. Used on the trio thread."""

    lip: Lip
    request: Request
    is_answered: bool = False
    is_cancelled: bool = False
    _num_bytes: int = 0
    """Bytes that are counted while the call is in flight."""
    _is_waiting: bool = False
    _tied_to: int = 0
    _cancel: Callable[[], None] | None = None

    def count_bytes(self) -> None:
        """Count the request's bytes until the call is answered. WouldBlock: too many bytes are in flight."""
        num_bytes = cost_of(self.request)
        self.lip.under_way.begin(num_bytes)
        self._num_bytes = num_bytes

    def check_may_wait(self, max_waiting: int) -> None:
        """Raise WouldBlock if the program has `max_waiting` waiting calls, or OverQuota if its user has too many."""
        if self.lip.num_later >= max_waiting:
            raise WouldBlock(f"{max_waiting} calls of this program wait already: let some of them end")
        self.lip.holdings.require(Kind.CALL)

    def wait(self, cancel: Callable[[], None]) -> None:
        """Note that the call waits for an event that answers it. CANCEL calls `cancel` instead."""
        self._is_waiting = True
        self.lip.num_later += 1
        self.lip.holdings.charge(Kind.CALL)
        self.when_cancelled(cancel)

    def when_cancelled(self, cancel: Callable[[], None]) -> None:
        """Set the function that CANCEL calls from now on. If two calls have the same id, the newer call counts."""
        older = self.lip.calls.get(self.request.id)
        if older is not None and older is not self:
            older.forget()
        self._cancel = cancel
        self.lip.calls[self.request.id] = self

    def tie(self, handle: int) -> None:
        """Tie the call to a handle. Another operation on the handle may then cancel the call: see `Lip.tied`."""
        self._tied_to = handle
        self.lip.tied.setdefault(handle, set()).add(self)

    def forget(self) -> None:
        """Make CANCEL do nothing from now on, and drop references to objects, because some of the objects refer to the
        call.
        """
        self._cancel = None
        lip = self.lip
        if lip.calls.get(self.request.id) is self:
            del lip.calls[self.request.id]
        if self._tied_to:
            lip.untie(self._tied_to, self)
            self._tied_to = 0

    def again(self, request_id: int) -> SystemCall:
        """Return a later call with the same request and another id."""
        return SystemCall(self.lip, self.request._replace(id=request_id))

    def cancel(self) -> None:
        """Run the function that `when_cancelled` has set, if any. A second cancel does nothing."""
        cancel = self._cancel
        self.is_cancelled = True
        self.forget()
        if cancel is not None:
            cancel()

    def answer(self, outcome: Reply | SymError) -> None:
        """Send the call's only answer."""
        self.drop()
        if isinstance(outcome, SymError):
            self.lip.channel.reply(self.request.id, error=outcome)
        else:
            self.lip.channel.reply(self.request.id, outcome.args, outcome.payload, num_rows=outcome.num_rows)

    def answer_by(self, function: Callable[[], Reply]) -> None:
        """Answer with the reply of a function, or with its error."""
        try:
            reply = function()
        except Exception as failure:  # noqa: BLE001 - reported by `fail`, which knows every kind
            self.fail(failure)
        else:
            self.answer(reply)

    def fail(self, failure: Exception) -> None:
        """Answer with an error. Any exception but a SymError is a fault of the daemon, and is logged."""
        if isinstance(failure, SymError):
            self.answer(failure)
            return
        name = self.request.op.name
        log.error("%s of program %d failed", name, self.lip.pid, exc_info=failure, extra=self.lip.subject)
        self.answer(SymError(f"{name} failed inside the daemon: {failure!r}"))

    def send(self, args: tuple[int, ...], payload: bytes = b"") -> None:
        """Send a reply after which more replies follow."""
        self.lip.channel.reply(self.request.id, args, payload, more=True)

    def drop(self) -> None:
        """End the call without an answer: the caller sends the answer, or the program has gone."""
        assert not self.is_answered, f"{self.request.op.name} of program {self.lip.pid} is answered twice"
        self.is_answered = True
        self.forget()
        if self._is_waiting:
            self.lip.num_later -= 1
            self.lip.holdings.let_go(Kind.CALL)
        if self._num_bytes:
            self.lip.under_way.end(self._num_bytes)
