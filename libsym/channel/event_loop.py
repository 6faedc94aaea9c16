"""Calls in event loops of trio and asyncio, through anyio. No thread waits here.

The tasks of an event loop that wait for replies share one descriptor, an epoll (see client_state.h). Only one task may
wait for a descriptor. So the tasks choose a leader, as the threads do in C: the reader. The reader waits for the
descriptor, and serves the tasks whose replies have come: it passes the replies to them, and wakes those that want no
more. When the reader itself is served, another task becomes the reader. A background task could read, too, but would
need a nursery, which a library does not have.

If the ring or the table of calls is full, requests wait in a queue, and the reader sends them when there is space. A
task that is cancelled while it waits drops its call. Dropping the call sends a CANCEL without waiting.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable
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
_TURN_S = 0.002
"""Time for which the reader passes on replies before other tasks of the loop run."""
_ODD = 0x9E3779B1
"""Multiplier of a hash that spreads addresses."""


async def run(channel: ClientChannel, script: Script[T]) -> T:
    """Run the calls of a script, one after the other, and return its result. The task waits."""
    try:
        call = next(script)
        while True:
            try:
                reply = await perform(channel, call)
            except BaseException as error:  # noqa: BLE001 - the script may clean up, and raises the error again
                call = script.throw(error)
            else:
                call = script.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def perform(channel: ClientChannel, request: Call) -> Reply:
    """Make a call and return its reply. If the task is cancelled, the daemon cancels the call, too."""
    stream = AsyncStream(channel, request)
    try:
        return await stream.next()
    finally:
        stream.close()


class AsyncStream:
    """The replies to one request, for one task at a time. Dropping an unfinished stream cancels the call."""

    def __init__(self, channel: ClientChannel, request: Call) -> None:
        self._channel = channel
        self._call: Any = channel.new_call(request)
        self._payload: bytes | None = request.payload
        self._is_awaited = False
        self._error: BaseException | None = None  # to be raised by `each`
        self._has_ended = False

    @property
    def is_over(self) -> bool:
        """Whether the last reply was taken, or an error was raised."""
        return self._has_ended and self._error is None

    async def next(self) -> Reply:
        """Wait for the next reply and return it, or raise the call's error. `reply.more`: other replies follow.

        If the task is cancelled just when the reply comes, the reply is lost.
        """
        found = list[Reply]()
        await self.each(found.append)
        return found[0]

    async def each(self, take: Callable[[Reply], bool | None]) -> None:
        """Wait for replies, and call `take` with each until it returns False or None, or until the last reply.

        The reader calls `take` as soon as a reply has come, and this task sleeps on. Errors of the call and of `take`
        are raised here. Cancelling the task ends the wait, not the call: later replies are kept. `close()` ends the
        call.
        """
        if self.is_over:
            raise Invalid("nothing more comes: the last reply was taken, or the call was closed")
        if self._is_awaited:
            raise Invalid("another task waits for the next reply: only one at a time may")

        def taken(answer: Any) -> bool:
            try:
                reply = Reply.of_answer(answer, self._channel)
                self._has_ended, self._error = not reply.more, reply.error
                return reply.error is None and bool(take(reply)) and not self._has_ended
            except BaseException as error:  # noqa: BLE001 - the reader may be another task, and must not get the error
                self._error = error
                return False

        waits = _waits_of(self._channel)
        waiter = _Waiter(self._call, self._payload, taken)
        self._is_awaited = True
        try:
            if self._payload is not None:
                waits.submit(waiter)
            await checkpoint()  # lets other tasks send their requests before this task waits
            if self._error is None:
                await waits.served(waiter)
        finally:
            self._is_awaited = False
            waits.withdraw(waiter)
            if waiter.is_sent:
                self._payload = None
        if waiter.rc:
            self._has_ended = True
            raise self._channel.failure(waiter.rc, len(self._payload or b""))
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # else a cycle: the error's traceback holds this frame

    def cancel(self) -> None:
        """Ask the daemon to end the call. Replies that it has sent still come, then the last reply or ECANCELED."""
        if not self.is_over:
            lib.sym_call_cancel(self._call)

    def close(self) -> None:
        """End the stream without waiting: the call is cancelled if it is not over, and no more replies come."""
        self._has_ended = True
        ffi.release(self._call)


class _Waiter:
    """A task that waits for replies to its call, or for space to send the request."""

    __slots__ = ("_event", "_is_served", "_take", "call", "has_more", "is_sent", "payload", "rc", "stream")

    def __init__(self, call: Any, payload: bytes | None, take: Callable[[Any], bool]) -> None:
        """`take` takes an answer, and returns whether the task sleeps on."""
        self.call = call
        self._take = take
        self._is_served = False
        self.payload = payload or b""
        self.is_sent = payload is None
        self.stream = hash(anyio.get_current_task().id) * _ODD >> 16 & 0xFFFF or 1
        """A hash of the task: the daemon predicts when the task's next call comes."""
        self.rc = 0
        """-errno of a failed wait. 0: the wait has not failed."""
        self.has_more = False
        """Whether answers may be left that `is_served` had no time for."""
        self._event: anyio.Event | None = None

    def is_served(self, until_s: float) -> bool:
        """Take the answers that have come, the first at any time; return whether the task has to wake."""
        self.has_more = False
        while not (self._is_served or self.rc):
            if self.has_more and time.monotonic() >= until_s:
                return False
            answer = lib.sym_call_take(self.call)
            self.has_more = answer != ffi.NULL
            if not self.has_more:
                return False
            self._is_served = not self._take(ffi.gc(answer, lib.sym_answer_drop))
        return True

    async def sleep(self) -> None:
        self._event = anyio.Event()
        await self._event.wait()

    def wake(self) -> None:
        if self._event is not None:
            self._event.set()


class _Waits:
    """The tasks of one event loop that wait for replies on one connection."""

    def __init__(self, channel: ClientChannel) -> None:
        self._loop = channel.new_loop()
        self._fd: int = lib.sym_event_loop_fd(self._loop)
        self._tags = ffi.new("uint64_t[]", _TAKE_AT_ONCE)
        self._asleep: dict[int, _Waiter] = {}
        """Waiters by tag. A tag is the address of the waiter's call."""
        self._unsent: deque[_Waiter] = deque()
        self._again: list[int] = []
        """Tags of waiters that have more answers."""
        self._until_s = 0.0
        """Time at which the reader lets other tasks of the loop run."""
        self._reader: _Waiter | None = None

    def submit(self, waiter: _Waiter) -> None:
        """Send a request, or queue it behind the requests that wait for space."""
        if self._unsent or not self._send(waiter):
            self._unsent.append(waiter)

    async def served(self, waiter: _Waiter) -> None:
        """Sleep until a waiter is served, or its wait has failed."""
        tag = _tag(waiter.call)
        try:
            while not waiter.is_served(self._until_s):
                if self._reader is None:
                    self._reader = waiter
                if self._reader is waiter:
                    await self._read(has_more=waiter.has_more)
                else:
                    self._asleep[tag] = waiter
                    await waiter.sleep()
        finally:
            self._asleep.pop(tag, None)
            if self._reader is waiter:
                self._hand_over()

    def withdraw(self, waiter: _Waiter) -> None:
        """Remove a request that was not sent from the queue, because its task no longer waits."""
        if not waiter.is_sent and waiter in self._unsent:
            self._unsent.remove(waiter)
            if not self._unsent:
                lib.sym_event_loop_want_nothing(self._loop)

    async def _read(self, *, has_more: bool) -> None:
        """As the reader: take replies and wake their tasks, or sleep until replies may have come.

        `has_more`: the reader's own call may have more answers.
        """
        if self._take() or has_more:
            if time.monotonic() < self._until_s:
                return
            await checkpoint()
        elif lib.sym_event_loop_arm(self._loop):
            await anyio.wait_readable(self._fd)
        self._until_s = time.monotonic() + _TURN_S

    def _take(self) -> bool:
        """Wake the tasks whose replies have come, and send queued requests. Return whether there was any work."""
        count = lib.sym_event_loop_take(self._loop, self._tags, _TAKE_AT_ONCE)
        if count < 0:
            self._fail(count)
            return True
        tags = dict.fromkeys([*self._again, *ffi.unpack(self._tags, count)])
        self._again.clear()
        for tag in tags:
            waiter = self._asleep.get(tag)  # None: no task waits, or the reader made the call itself
            if waiter is None:
                continue
            if waiter.is_served(self._until_s):
                del self._asleep[tag]
                waiter.wake()
            elif waiter.has_more:
                self._again.append(tag)
        sent = False
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()
            sent = True
        return bool(tags) or sent

    def _send(self, waiter: _Waiter) -> bool:
        """Try to send a request. False: there is no space now. A permanent failure wakes the task."""
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
        """Wake all tasks with an error: the connection is over."""
        waiters = [*self._asleep.values(), *self._unsent]
        if self._reader is not None:
            waiters.append(self._reader)
        self._asleep.clear()
        self._unsent.clear()
        for waiter in waiters:
            waiter.rc = rc
            waiter.wake()

    def _hand_over(self) -> None:
        """Make another task the reader, and wake it."""
        self._reader = None
        if self._asleep:
            _, self._reader = self._asleep.popitem()
            self._reader.wake()


def _tag(call: Any) -> int:
    return int(ffi.cast("uintptr_t", call))


_waits: RunVar[WeakKeyDictionary[ClientChannel, _Waits]] = RunVar("libsym waits")


def _waits_of(channel: ClientChannel) -> _Waits:
    """Return the waiting tasks of the running event loop for a connection. The object lasts as long as the loop and the
    connection.
    """
    try:
        found = _waits.get()
    except LookupError:
        found = WeakKeyDictionary()
        _waits.set(found)
    waits = found.get(channel)
    if waits is None:
        waits = found[channel] = _Waits(channel)
    return waits
