"""Calls in event loops: under anyio, so for trio and asyncio alike. No thread waits for anything here.

The tasks of an event loop that wait for replies share one descriptor (an epoll: see client.h), and only one task may
wait for a descriptor. So the tasks do as the threads do in C: one of them, the reader, waits for the descriptor and
wakes those whose replies have come; when its own is there it hands over to another. A background task would need a
nursery, for which a library has no place.

A request that finds the ring or the table of calls full waits in order; the reader sends it when there is room. A task
that is cancelled while it waits drops its call: that sends a CANCEL and waits for nothing.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import anyio
from anyio.lowlevel import RunVar, checkpoint

from libsym._channel import ffi, lib
from libsym.channel.client import ClientChannel
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid

T = TypeVar("T")

_TAKE_AT_ONCE = 256
_ODD = 0x9E3779B1
"""Spreads addresses."""


async def run(channel: ClientChannel, script: Script[T]) -> T:
    """Runs the calls of a script, one after the other, and gives what it returns; waits with the task."""
    try:
        call = next(script)
        while True:
            try:
                reply = await perform(channel, call)
            except BaseException as error:  # noqa: BLE001 - the script may clean up, and raises it again
                call = script.throw(error)
            else:
                call = script.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def perform(channel: ClientChannel, request: Call) -> Reply:
    """Make a call; cancelling the task ends the call at the daemon, too."""
    stream = AsyncStream(channel, request)
    try:
        return await stream.next()
    finally:
        stream.close()


class AsyncStream:
    """The replies to one request, for one task at a time. Dropped before its end it is cancelled."""

    def __init__(self, channel: ClientChannel, request: Call) -> None:
        self._channel = channel
        self._call: Any = channel.new_call(request)
        self._payload: bytes | None = request.payload
        self._is_awaited = False
        self.is_over = False
        """The last reply was given out, or an error was."""

    async def next(self) -> Reply:
        """The next reply, as soon as it is there; `reply.more` says whether others follow. Raises the call's error.

        Cancelling the task ends the wait, not the call: what comes meanwhile is kept. `close()` ends the call.
        """
        if self.is_over:
            raise Invalid("nothing more comes: the last reply was taken, or the call was closed")
        if self._is_awaited:
            raise Invalid("another task waits for what comes next: one at a time")
        waits = _waits_of(self._channel)
        waiter = _Waiter(self._call, self._payload)
        self._is_awaited = True
        try:
            if self._payload is not None:
                waits.submit(waiter)
            await checkpoint()  # whoever else has something to send does so before anybody waits
            answer = await waits.answer(waiter)
        finally:
            self._is_awaited = False
            waits.withdraw(waiter)
            if waiter.is_sent:
                self._payload = None
        if answer == ffi.NULL:
            self.is_over = True
            raise self._channel.failure(waiter.rc, len(self._payload or b""))
        reply = Reply.of_answer(ffi.gc(answer, lib.sym_answer_drop), self._channel)
        self.is_over = not reply.more
        if reply.error is not None:
            try:
                raise reply.error
            finally:
                del reply  # the error holds this frame by its traceback, and would be held by it
        return reply

    def cancel(self) -> None:
        """Asks the daemon to end the call. What it had sent before still comes, and then the end, or ECANCELED."""
        if not self.is_over:
            lib.sym_call_cancel(self._call)

    def close(self) -> None:
        """Ends the call for this side: cancelled if it is not over, and nothing more comes. Waits for nothing."""
        self.is_over = True
        ffi.release(self._call)


class _Waiter:
    """A task that waits for a reply to its call, or first for room to send it."""

    __slots__ = ("_event", "call", "is_sent", "payload", "rc", "stream")

    def __init__(self, call: Any, payload: bytes | None) -> None:
        self.call = call
        self.payload = payload or b""
        self.is_sent = payload is None
        self.stream = hash(anyio.get_current_task().id) * _ODD >> 16 & 0xFFFF or 1
        """The task, in few bits: the daemon may wait for its next call."""
        self.rc = 0
        """-errno: nothing will come."""
        self._event: anyio.Event | None = None

    async def sleep(self) -> None:
        self._event = anyio.Event()
        await self._event.wait()

    def wake(self) -> None:
        if self._event is not None:
            self._event.set()


class _Waits:
    """The tasks of one event loop that wait for one connection. Nothing awaits but where `await` stands."""

    def __init__(self, channel: ClientChannel) -> None:
        self._loop = channel.new_loop()
        self._fd: int = lib.sym_event_loop_fd(self._loop)
        self._tags = ffi.new("uint64_t[]", _TAKE_AT_ONCE)
        self._asleep: dict[int, _Waiter] = {}
        """By the address of the call, which is its tag."""
        self._unsent: deque[_Waiter] = deque()
        self._reader: _Waiter | None = None

    def submit(self, waiter: _Waiter) -> None:
        """Sends a request, or puts it behind those that wait for room."""
        if self._unsent or not self._send(waiter):
            self._unsent.append(waiter)

    async def answer(self, waiter: _Waiter) -> Any:
        """The next reply to a call, or NULL: then `waiter.rc` says why."""
        tag = _tag(waiter.call)
        try:
            while True:
                answer = lib.sym_call_take(waiter.call)
                if answer != ffi.NULL or waiter.rc:
                    return answer
                if self._reader is None:
                    self._reader = waiter
                if self._reader is waiter:
                    await self._read()
                else:
                    self._asleep[tag] = waiter
                    await waiter.sleep()
        finally:
            self._asleep.pop(tag, None)
            if self._reader is waiter:
                self._hand_over()

    def withdraw(self, waiter: _Waiter) -> None:
        """Give up a call whose task waits no longer: what was not sent will not be, by whoever reads."""
        if not waiter.is_sent and waiter in self._unsent:
            self._unsent.remove(waiter)
            if not self._unsent:
                lib.sym_event_loop_want_nothing(self._loop)

    async def _read(self) -> None:
        """As the reader: takes what is there and wakes whose it is, or else sleeps until there is something."""
        if not self._take() and lib.sym_event_loop_arm(self._loop):
            await anyio.wait_readable(self._fd)

    def _take(self) -> bool:
        """Whether there was anything. The reader's own reply it finds itself."""
        count = lib.sym_event_loop_take(self._loop, self._tags, _TAKE_AT_ONCE)
        if count < 0:
            self._fail(count)
            return True
        for tag in ffi.unpack(self._tags, count):
            waiter = self._asleep.pop(tag, None)  # None: the reader, or a stream that nobody waits for now
            if waiter is not None:
                waiter.wake()
        sent = False
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()
            sent = True
        return count > 0 or sent

    def _send(self, waiter: _Waiter) -> bool:
        """False: there is no room now. What fails for good counts as sent, and its task is told."""
        payload = waiter.payload
        rc = lib.sym_event_loop_submit(self._loop, waiter.call, _tag(waiter.call), waiter.stream, payload, len(payload))
        if rc == -errno.EAGAIN:
            return False
        waiter.is_sent = rc == 0
        waiter.rc = rc
        if rc:
            self._asleep.pop(_tag(waiter.call), None)
            waiter.wake()
        return True

    def _fail(self, rc: int) -> None:
        """The connection is over: so is every wait."""
        waiters = [*self._asleep.values(), *self._unsent]
        if self._reader is not None:
            waiters.append(self._reader)
        self._asleep.clear()
        self._unsent.clear()
        for waiter in waiters:
            waiter.rc = rc
            waiter.wake()

    def _hand_over(self) -> None:
        """The reader leaves: another one reads, from when it wakes on."""
        self._reader = None
        if self._asleep:
            _, self._reader = self._asleep.popitem()
            self._reader.wake()


def _tag(call: Any) -> int:
    return int(ffi.cast("uintptr_t", call))


_waits: RunVar[WeakKeyDictionary[ClientChannel, _Waits]] = RunVar("libsym waits")


def _waits_of(channel: ClientChannel) -> _Waits:
    """Give the waits of the running event loop. They go with the loop, and with the connection."""
    try:
        found = _waits.get()
    except LookupError:
        found = WeakKeyDictionary()
        _waits.set(found)
    waits = found.get(channel)
    if waits is None:
        waits = found[channel] = _Waits(channel)
    return waits
