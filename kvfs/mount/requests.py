"""Answers requests of the kernel: at once where possible, else by a task. No exception reaches the C code.

A request arrives as a call from C. Its handler returns a *status*: the length of the packed answer (see
`kvfs.mount.wire`). Only this module turns exceptions of handlers into errnos. An exception that is not a SymError is a
bug: the request is answered with EIO, the exception is logged, and the mount continues.

A handler that waits is an eager coroutine (`kvfs.mount.eager`). A signal to the requesting process (Ctrl-C, SIGKILL)
cancels the handler, and the request is answered with EINTR. A signal also cancels a request that `kvfs.mount.pace` has
put off.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

import trio

from kvfs.mount import shim
from kvfs.mount.eager import LEFT, Eager
from kvfs.mount.pace import QUANTUM, STAYS_BUSY_S, Pace
from kvfs.names.agreement import Unsettled, when_settled
from kvfs.pages.accounts import StillCharged
from kvfs.pages.holdings import Holdings, Kind
from kvfs.volume.patience import when_forgotten
from libsym.errors import SymError

log = logging.getLogger(__name__)

Quick: TypeAlias = Callable[..., int]
"""A handler that never waits."""
Slow: TypeAlias = Callable[..., Coroutine[Any, Any, int]]
"""A handler that may wait."""
Waiting: TypeAlias = OrderedDict[Any, functools.partial[int]]
"""Requests of one uid that were put off, oldest first. Each value is a function that answers the request."""


class Requests:
    """The requests of one mount that are being answered."""

    def __init__(
        self,
        eager: Eager,
        pace: Pace,
        catch_up: Callable[[], None] = lambda: None,
        holdings: Callable[[int], Holdings] = lambda _uid: Holdings(),
    ) -> None:
        """`catch_up` is called before a handler looks at a file, so that the file shows all computed entries.

        `holdings` returns the holdings of a uid, to which waiting requests are charged.
        """
        self._catch_up = catch_up
        self._eager = eager
        self._pace = pace
        self._holdings = holdings
        self._latest: Any = None
        """The request that began last."""
        self._nursery: trio.Nursery | None = None
        self._scopes: dict[Any, trio.CancelScope] = {}
        self._put_off: dict[int, OrderedDict[int, Waiting]] = {}
        """Requests that were put off, by payer (see `kvfs.mount.pace`), then by uid. Users of the shared bucket are
        answered one after the other.
        """
        self._something_put_off = trio.Event()
        self._lingers = True

    async def serve(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Answer the calls from C while `loop` runs."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._answer_put_off)
            await loop()
            self._nursery.cancel_scope.cancel()

    @property
    def caller(self) -> int:
        """The uid of the request that began last. A handler may use this property until its first wait."""
        return shim.uid(self._latest)

    # Called from C

    def answer(self, handler: Quick, request: Any, *arguments: Any) -> int:
        """Answer a request by a handler that never waits."""
        self._latest = request
        try:
            self._catch_up()
            return handler(*arguments)
        except (StillCharged, Unsettled):
            return self._later(request, self._repeated(handler, request, arguments), handler, arguments)
        except Exception as error:  # noqa: BLE001 - no exception may reach C
            return -errno_of(error, handler, arguments)

    def begin(self, handler: Slow, request: Any, *arguments: Any) -> int:
        """Answer a request by a handler that may wait. If the handler waits, it continues as a task."""
        self._latest = request
        coroutine = handler(*arguments)
        try:
            self._catch_up()
            status = self._eager.start(coroutine)
        except Exception as error:  # noqa: BLE001
            # A write's data is in memory of C that is valid only until this method returns, so a write can't be tried
            # again.
            is_repeated = isinstance(error, StillCharged | Unsettled)
            if is_repeated and not any(isinstance(each, memoryview) for each in arguments):
                return self._later(request, self._repeated(handler, request, arguments), handler, arguments)
            return -errno_of(error, handler, arguments)
        if isinstance(status, int):
            return status
        assert status is LEFT
        return self._later(request, coroutine, handler, arguments)

    def _later(
        self,
        request: Any,
        coroutine: Coroutine[Any, Any, int],
        handler: Quick | Slow,
        arguments: Sequence[object],
    ) -> int:
        """Have a task answer the request."""
        assert self._nursery is not None
        self._nursery.start_soon(self._finish, request, coroutine, handler, arguments)
        return shim.LATER

    def paced(self, how: Callable[..., int], handler: Quick | Slow, request: Any, *arguments: Any) -> int:
        """Answer a request by `how` (`answer` or `begin`) as soon as its user's token bucket admits it."""
        uid = shim.uid(request)
        payer = self._pace.payer(uid)
        admitted = payer not in self._put_off and self._pace.admits(payer)
        if self._pace.is_free is not self._lingers:
            self._lingers = self._pace.is_free
            shim.linger(self._lingers)
        if admitted:
            return how(handler, request, *arguments)
        waiting = self._put_off.setdefault(payer, OrderedDict()).setdefault(uid, OrderedDict())
        waiting[request] = functools.partial(how, handler, request, *arguments)
        self._holdings(uid).charge(Kind.REQUEST, num_bytes=_num_bytes(arguments))
        self._something_put_off.set()
        shim.watch(request)
        return shim.LATER

    def interrupted(self, request: Any) -> None:
        """Cancel a request whose program got a signal."""
        scope = self._scopes.get(request)
        if scope is not None:
            scope.cancel()
        elif self._was_put_off(request):
            assert self._nursery is not None
            self._nursery.start_soon(self._refuse, request)  # libfuse holds the request's lock during this call

    def _was_put_off(self, request: Any) -> bool:
        """Whether the request was put off. If so, remove it from the queue."""
        uid = shim.uid(request)
        for users in self._put_off.values():
            waiting = users.get(uid)
            if waiting is not None and (call := waiting.pop(request, None)) is not None:
                self._holdings(uid).let_go(Kind.REQUEST, num_bytes=_num_bytes(call.args))
                if not waiting:
                    del users[uid]
                return True
        return False

    # Tasks

    async def _repeated(self, handler: Quick | Slow, request: Any, arguments: Sequence[object]) -> int:
        """Run a request again from its beginning, once the kernel has forgotten files that the account is still charged
        for, or other machines have agreed.
        """

        async def attempt() -> int:
            self._latest = request
            self._catch_up()
            answer = handler(*arguments)
            return answer if isinstance(answer, int) else await answer

        return await when_settled(lambda: when_forgotten(attempt))

    async def _finish(
        self, request: Any, coroutine: Coroutine[Any, Any, int], handler: Quick | Slow, arguments: Sequence[object]
    ) -> None:
        status = -errno.EINTR
        holdings = self._holdings(shim.uid(request))
        num_bytes = _num_bytes(arguments)
        # No request is refused here. Each request blocks a thread of its user, and a thread takes more memory than a
        # request.
        holdings.charge(Kind.REQUEST, num_bytes=num_bytes)
        scope = self._scopes[request] = trio.CancelScope()
        shim.watch(request)
        try:
            with scope:
                try:
                    status = await self._eager.finish(coroutine)
                except Unsettled:
                    if any(isinstance(each, memoryview) for each in arguments):
                        raise
                    status = await self._repeated(handler, request, arguments)
        except Exception as error:  # noqa: BLE001
            status = -errno_of(error, handler, arguments)
        finally:  # also when the mount ends, because otherwise libfuse would keep the request
            holdings.let_go(Kind.REQUEST, num_bytes=num_bytes)
            del self._scopes[request]
            shim.answer(request, status)

    async def _refuse(self, request: Any) -> None:
        shim.answer(request, -errno.EINTR)

    async def _answer_put_off(self) -> None:
        while True:
            await self._something_put_off.wait()
            self._something_put_off = trio.Event()
            while self._put_off:
                # Sleep at most until the decoder may count as idle. From then on, no request needs to wait.
                await trio.sleep(min(STAYS_BUSY_S, *map(self._pace.wait_s, self._put_off)))
                for payer, users in tuple(self._put_off.items()):
                    self._answer_waiting(payer, users)
                    if not users:
                        del self._put_off[payer]

    def _answer_waiting(self, payer: int, users: OrderedDict[int, Waiting]) -> None:
        """Answer the requests of one payer that its bucket admits now. Only a few are answered, so that other tasks can
        run.
        """
        for _ in range(QUANTUM):
            if not users or not self._pace.admits(payer):
                break
            uid, waiting = users.popitem(last=False)
            request, call = waiting.popitem(last=False)
            self._holdings(uid).let_go(Kind.REQUEST, num_bytes=_num_bytes(call.args))
            if waiting:
                users[uid] = waiting  # moves the user to the end of the queue
            status = call()
            if status != shim.LATER:
                shim.answer(request, status)


def _num_bytes(arguments: Sequence[object]) -> int:
    """Return the number of bytes in a request's arguments, which are names, values, or data to be written."""
    return sum(len(each) for each in arguments if isinstance(each, bytes | memoryview))


def errno_of(error: Exception, handler: Callable[..., object], arguments: Sequence[object]) -> int:
    """Return the errno of the answer. An error that is not a SymError is a bug, and is logged."""
    if isinstance(error, SymError):
        return error.errno or errno.EIO
    name = getattr(handler, "__name__", repr(handler))
    log.error("request %s%r failed", name, tuple(arguments), exc_info=error)
    return errno.EIO
