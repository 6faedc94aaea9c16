"""Answers to requests of the kernel: at once where possible, by a task where they must wait, never by an exception.

A request comes as a call from C. Its handler returns a *status*: the length of the answer that it has packed, see
`kvfs.mount.wire`. What handlers raise becomes an errno here and nowhere else; anything but a SymError is a defect of
ours, an EIO and a line in the log, and the mount goes on.

A handler that waits is an eager coroutine (`kvfs.mount.eager`). While it waits, it can be interrupted: a signal to the
process that made the request (Ctrl-C, SIGKILL) cancels it, and the answer is EINTR; so it is for a request that has
been put off.
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
from kvfs.pages.accounts import StillCharged
from kvfs.pages.holdings import Holdings, Kind
from kvfs.patience import when_forgotten
from libsym.errors import SymError

log = logging.getLogger(__name__)

Quick: TypeAlias = Callable[..., int]
"""A handler that waits for nothing."""
Slow: TypeAlias = Callable[..., Coroutine[Any, Any, int]]
"""A handler that may have to wait."""
Waiting: TypeAlias = OrderedDict[Any, functools.partial[int]]
"""Requests of one uid that were put off, in order; called, they are answered."""


class Requests:
    """The requests of one mount that are being answered."""

    def __init__(
        self,
        eager: Eager,
        pace: Pace,
        catch_up: Callable[[], None] = lambda: None,
        holdings: Callable[[int], Holdings] = lambda _uid: Holdings(),
    ) -> None:
        """`catch_up` is called before anybody looks at a file: what is computed shows from then on.

        `holdings`: of a uid, which requests that wait are charged to.
        """
        self._catch_up = catch_up
        self._eager = eager
        self._pace = pace
        self._holdings = holdings
        self._latest: Any = None
        """The request that has begun last."""
        self._nursery: trio.Nursery | None = None
        self._scopes: dict[Any, trio.CancelScope] = {}
        self._put_off: dict[int, OrderedDict[int, Waiting]] = {}
        """By who pays (see `kvfs.mount.pace`), then by uid: those who share a bucket are answered in turn."""
        self._something_put_off = trio.Event()
        self._lingers = True

    async def serve(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Answer what C calls with as long as `loop` runs."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._answer_put_off)
            await loop()
            self._nursery.cancel_scope.cancel()

    @property
    def caller(self) -> int:
        """The uid of the request that has begun last: of a handler's own, until that waits."""
        return shim.uid(self._latest)

    # Called from C

    def answer(self, handler: Quick, request: Any, *arguments: Any) -> int:
        """By a handler that waits for nothing."""
        self._latest = request
        try:
            self._catch_up()
            return handler(*arguments)
        except StillCharged:
            return self._later(request, self._when_forgotten(handler, request, arguments), handler, arguments)
        except Exception as error:  # noqa: BLE001 - nothing may reach C
            return -errno_of(error, handler, arguments)

    def begin(self, handler: Slow, request: Any, *arguments: Any) -> int:
        """By a handler that may have to wait: then it goes on as a task."""
        self._latest = request
        coroutine = handler(*arguments)
        try:
            self._catch_up()
            status = self._eager.start(coroutine)
        except Exception as error:  # noqa: BLE001
            # What is written is C's, and there until now.
            if isinstance(error, StillCharged) and not any(isinstance(each, memoryview) for each in arguments):
                return self._later(request, self._when_forgotten(handler, request, arguments), handler, arguments)
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
        """By a task."""
        assert self._nursery is not None
        self._nursery.start_soon(self._finish, request, coroutine, handler, arguments)
        return shim.LATER

    def paced(self, how: Callable[..., int], handler: Quick | Slow, request: Any, *arguments: Any) -> int:
        """By one of the two above, as soon as the pace admits it."""
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
            self._nursery.start_soon(self._refuse, request)  # libfuse holds the request's lock just now

    def _was_put_off(self, request: Any) -> bool:
        """Whether the request is waiting for its turn; it is no longer."""
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

    async def _when_forgotten(self, handler: Quick | Slow, request: Any, arguments: Sequence[object]) -> int:
        """Answer a request, from its beginning, when the user's account has the room that it lacked."""

        async def attempt() -> int:
            self._latest = request
            self._catch_up()
            answer = handler(*arguments)
            return answer if isinstance(answer, int) else await answer

        return await when_forgotten(attempt)

    async def _finish(
        self, request: Any, coroutine: Coroutine[Any, Any, int], handler: Quick | Slow, arguments: Sequence[object]
    ) -> None:
        status = -errno.EINTR
        holdings = self._holdings(shim.uid(request))
        num_bytes = _num_bytes(arguments)
        holdings.charge(Kind.REQUEST, num_bytes=num_bytes)  # a thread of the user's waits for each, and takes more
        scope = self._scopes[request] = trio.CancelScope()
        shim.watch(request)
        try:
            with scope:
                status = await self._eager.finish(coroutine)
        except Exception as error:  # noqa: BLE001
            status = -errno_of(error, handler, arguments)
        finally:  # at the end of the mount too, or libfuse would keep the request
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
                # Not longer than rest takes to be rest: from then on nobody needs to wait.
                await trio.sleep(min(STAYS_BUSY_S, *map(self._pace.wait_s, self._put_off)))
                for payer, users in tuple(self._put_off.items()):
                    self._answer_waiting(payer, users)
                    if not users:
                        del self._put_off[payer]

    def _answer_waiting(self, payer: int, users: OrderedDict[int, Waiting]) -> None:
        """Answer what the pace admits now of one payer's requests: few at a time, for others want their turn."""
        for _ in range(QUANTUM):
            if not users or not self._pace.admits(payer):
                break
            uid, waiting = users.popitem(last=False)
            request, call = waiting.popitem(last=False)
            self._holdings(uid).let_go(Kind.REQUEST, num_bytes=_num_bytes(call.args))
            if waiting:
                users[uid] = waiting  # behind the others
            status = call()
            if status != shim.LATER:
                shim.answer(request, status)


def _num_bytes(arguments: Sequence[object]) -> int:
    """Bytes that a request brings along: names, values, data to be written."""
    return sum(len(each) for each in arguments if isinstance(each, bytes | memoryview))


def errno_of(error: Exception, handler: Callable[..., object], arguments: Sequence[object]) -> int:
    """Give the errno to answer with. An error that is no SymError is a defect of ours."""
    if isinstance(error, SymError):
        return error.errno or errno.EIO
    name = getattr(handler, "__name__", repr(handler))
    log.error("request %s%r failed", name, tuple(arguments), exc_info=error)
    return errno.EIO
