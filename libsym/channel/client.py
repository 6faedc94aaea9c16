"""The LIP's half of a channel, for any number of threads. The C functions in `client*.c` do the waiting."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from libsym._channel import ffi, lib
from libsym.abi import HEADER_BYTES, MAX_FRAME_BYTES, Op
from libsym.arguments import shown
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call, Script
from libsym.errors import BadHandle, Invalid, NotConnected, ProtocolError, SymError, TooLarge

T = TypeVar("T")

_INTERRUPTED = -errno.EINTR
_NOTHING_MORE = "nothing more comes: the last reply was taken, or the call was closed"
_call = lib.sym_client_call


class ClientChannel:
    """The LIP's half of a connection, shared by all threads of the process."""

    def __init__(self, connection: socket.socket, memfd: int, doorbell: int, bell: int, name: str) -> None:
        """Make the channel, which owns the four descriptors from now on. `name` is the socket's path, for messages."""
        self.name = name
        client = lib.sym_client_new(memfd, os.fstat(memfd).st_size, connection.fileno(), doorbell, bell)
        if client == ffi.NULL:
            reason = os.strerror(ffi.errno)
            connection.close()
            for fd in (memfd, doorbell, bell):
                os.close(fd)
            raise ProtocolError(f"the region that the daemon at {name} sent cannot be used: {reason}")
        connection.detach()
        os.close(memfd)
        self._client: Any = ffi.gc(client, lib.sym_client_drop)
        self._results: list[tuple[Any, memoryview]] = []  # spare results for reuse; append and pop are atomic
        self.owner_pid = os.getpid()
        self.vocab_size: int = lib.sym_client_vocab_size(client)
        self.num_slots: int = lib.sym_client_slot_count(client)
        self.slot_bytes: int = lib.sym_client_slot_bytes(client)
        self.named_files: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """Open files that have a name, by handle."""
        self.vocabulary: list[bytes] | None = None
        """The bytes of each token. None: not asked for yet."""
        self.token_texts: Any = None
        """The bytes of each token for C, a `TokenTexts`: see `libsym.rows.stops`."""

    def run(self, script: Script[T]) -> T:
        """Run the calls of a script, one after the other, and return its result. The thread waits."""
        try:
            call = next(script)
            while True:
                try:
                    reply = self.perform(call)
                except BaseException as error:  # noqa: BLE001 - the script may clean up, and raises the error again
                    call = script.throw(error)
                else:
                    call = script.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def call(
        self,
        op: Op,
        *,
        flags: int = 0,
        handle: int = 0,
        args: tuple[int, int, int, int] = (0, 0, 0, 0),
        payload: bytes = b"",
    ) -> Reply:
        """Perform one call without a script: see `perform`."""
        return self.perform(Call(op, flags, handle, args, payload))

    def perform(self, request: Call) -> Reply:
        """Send a request and wait for its reply. An exception of a signal handler (Ctrl-C) ends the wait."""
        op, flags, handle, args, payload = request
        try:
            room = self._results.pop()
        except IndexError:
            room = _new_result()
        result, view = room
        payload_bytes = len(payload)
        try:
            rc = _call(self._client, result, op, flags, handle, *args, payload, payload_bytes)
            while rc == _INTERRUPTED:  # returned at least every 100 ms, so that Python runs its signal handlers
                rc = lib.sym_result_wait(result, payload, payload_bytes)
            if rc:
                raise self.failure(rc, payload_bytes)  # noqa: TRY301 - the handler below drops the result, as it must
            reply = Reply.of_result(result, view, self)
        except BaseException as error:
            lib.sym_result_drop(result)  # drops the call now: the traceback could keep it alive for long
            if isinstance(error, (OverflowError, TypeError)):
                raise wrong_number(request) from error
            raise
        self._results.append(room)
        if reply.error is not None:
            try:
                raise reply.error
            finally:
                del reply  # else a cycle: the error's traceback holds this frame, and the reply holds the error
        return reply

    def new_call(self, request: Call) -> Any:
        """Make a sym_call for a request without sending it. Dropping a sym_call cancels it."""
        try:
            new = lib.sym_call_new(self._client, request.op, request.flags, request.handle, *request.args)
        except (OverflowError, TypeError) as error:
            raise wrong_number(request) from error
        if new == ffi.NULL:
            raise self.failure(-errno.ENOTCONN)
        return ffi.gc(new, lib.sym_call_drop)

    def new_loop(self) -> Any:
        """Return a sym_event_loop, through which an event loop waits for replies."""
        new = lib.sym_event_loop_new(self._client)
        if new == ffi.NULL:
            if ffi.errno == errno.ENOTCONN:
                raise self.failure(-errno.ENOTCONN)
            raise SymError(f"no descriptors for an event loop: {os.strerror(ffi.errno)}", ffi.errno)
        return ffi.gc(new, lib.sym_event_loop_drop)

    def close_later(self, handle: int) -> None:
        """Close a handle together with the next call. Never waits and never raises, because finalizers call this."""
        lib.sym_client_tell(self._client, Op.KV_CLOSE, handle, 0)

    def close_soon(self, handle: int) -> None:
        """Close a handle without waiting: now if the ring has space, else with the next call. Never raises."""
        lib.sym_client_tell(self._client, Op.KV_CLOSE, handle, 1)

    def unlock_soon(self, handle: int) -> None:
        """Release a lock without waiting: now if the ring has space, else with the next call. Never raises."""
        lib.sym_client_tell(self._client, Op.KV_UNLOCK, handle, 1)

    def stream(self, request: Call) -> Stream:
        """Return a stream for a request that gets several replies."""
        return Stream(self, request)

    @property
    def alive(self) -> bool:
        """Whether calls are possible. False after `close()`, after the daemon's end was noticed, and in the child of a
        fork.
        """
        return not self._client.dead and self.owner_pid == os.getpid()

    def daemon_is_there(self) -> bool:
        """Return whether the daemon is running. Unlike `alive`, this method looks at the socket."""
        return self.alive and lib.sym_client_gone(self._client) == 0

    def close(self) -> None:
        """End the connection. Threads that wait get NotConnected. Rows stay readable while a Dist views them."""
        lib.sym_client_close(self._client)

    def disown(self) -> None:
        """Close the parent's descriptors in the child of a fork."""
        lib.sym_client_disown(self._client)

    def failure(self, rc: int, payload_bytes: int = 0) -> SymError:
        """Return the error to raise for a C call that returned -errno."""
        if rc == -errno.EMSGSIZE:
            return TooLarge(
                f"a message of {payload_bytes} bytes: {MAX_FRAME_BYTES - HEADER_BYTES} is the most, use several calls"
            )
        if rc == -errno.EBADF:
            return BadHandle(
                f"this belongs to process {self.owner_pid}, the parent of this one by fork: open it again here"
            )
        reason = self._client.dead
        if reason == errno.ESHUTDOWN:
            return NotConnected(f"the connection to {self.name} was closed by this program: use sym.connect()")
        if reason in (errno.EPROTO, errno.ENOMEM):
            return ProtocolError(f"a reply of the daemon at {self.name} could not be read: {os.strerror(reason)}")
        where = "" if "SYMPHONY_PROGRAM" in os.environ else f" at {self.name}"  # a launched program has its own socket
        remedy = "start it with `symphony serve`, then run the program again, or sym.connect() in it"
        return NotConnected(f"the daemon{where} is gone: {remedy}")


def _nothing(_reply: Reply) -> None:
    """Ignore a reply."""


class Stream:
    """The replies to one request, for one thread at a time. Dropping an unfinished stream cancels the call."""

    def __init__(self, channel: ClientChannel, request: Call) -> None:
        self._channel = channel
        self._payload: bytes | None = request.payload
        self._call = channel.new_call(request)
        self._found: Any = ffi.new("sym_tokens *")
        self._is_awaited = False
        self.is_over = False
        """Whether the last reply, or an error, was returned."""
        self._is_closed = False

    def start(self) -> None:
        """Send the request now, before the first wait for a reply."""
        payload = self._payload or b""
        rc = lib.sym_call_start(self._call, payload, len(payload))
        while rc == _INTERRUPTED:
            rc = lib.sym_call_start(self._call, payload, len(payload))
        if rc:
            self.close()
            raise self._channel.failure(rc, len(payload))
        self._payload = None

    def next(self, take: Callable[[Reply], None] = _nothing) -> Reply:
        """Wait for the next reply and return it, or raise the call's error. `reply.more`: other replies follow.

        Ctrl-C ends the wait, not the system call. Later replies are kept. If Ctrl-C came before `take` got the reply,
        the next `next()` returns this reply.
        """
        # A flag, not a lock: Ctrl-C could leave a lock held. No other thread runs between the test and the assignment.
        if self._is_awaited:
            raise Invalid("another thread waits for the next reply: only one at a time may")
        self._is_awaited = True
        try:
            return self._next(take)
        finally:
            self._is_awaited = False
            if self._is_closed:
                self._let_go()

    def tokens(self, take: Callable[[list[int], int, int], None]) -> bool:
        """Wait for replies of a generation, and pass to `take` the tokens of all replies that have arrived. False: the
        caller has to call `next` instead.

        The method is a fast form of `next`, for thousands of replies: after a step has swept the caches, each line of
        Python costs a microsecond or more. `take` gets the tokens, and the file's length after the first and after the
        last of the replies.
        """
        if self._is_awaited or self.is_over or self._payload is not None:
            return False
        self._is_awaited = True
        try:
            call, found = self._call, self._found
            while (rc := lib.sym_call_tokens(call, found)) == _INTERRUPTED:
                pass
            if rc or not found.num_replies:
                return False  # `next` takes the error, or the reply of another kind
            take(ffi.unpack(found.tokens, found.num_tokens), found.first_entries, found.entries)
            lib.sym_call_forget(call, found.num_replies)  # Ctrl-C cannot interrupt between `take` and this line
            return True
        finally:
            self._is_awaited = False
            if self._is_closed:
                self._let_go()

    def cancel(self) -> None:
        """Ask the daemon to end the call. Replies that it has sent still come, then the last reply or ECANCELED."""
        if not self.is_over:
            lib.sym_call_cancel(self._call)

    def close(self) -> None:
        """End the stream: the call is cancelled if it is not over, and no more replies come."""
        self.cancel()
        self.is_over = self._is_closed = True
        self._let_go()

    def _let_go(self) -> None:
        """Release the call of a closed stream. If a thread waits for a reply, that thread releases the call.

        A call that is over, but not closed, is released with this object: another thread may be cancelling it.
        """
        if not self._is_awaited:
            ffi.release(self._call)

    def _next(self, take: Callable[[Reply], None]) -> Reply:
        if self.is_over:
            raise Invalid(_NOTHING_MORE)
        payload = self._payload or b""
        rc = lib.sym_call_run(self._call, payload, len(payload))
        while rc == _INTERRUPTED:
            rc = lib.sym_call_run(self._call, payload, len(payload))
        if rc:
            self.is_over = True
            raise self._channel.failure(rc, len(payload))
        self._payload = None
        answer = self._call.answers
        if answer == ffi.NULL:  # the last reply was taken, but Ctrl-C came before `is_over` was set
            self.is_over = True
            raise Invalid(_NOTHING_MORE)
        reply = Reply.of_answer(answer, self._channel)
        if reply.error is None:
            take(reply)
        reply.own(ffi.gc(lib.sym_call_take(self._call), lib.sym_answer_drop))
        self.is_over |= not reply.more
        if reply.error is not None:
            try:
                raise reply.error
            finally:
                del reply  # else a cycle: the error's traceback holds this frame, and the reply holds the error
        return reply


def wrong_number(request: Call) -> Invalid:
    """Return the error for an argument that is not a whole number of 64 bits."""
    wrong = [arg for arg in request.args if not isinstance(arg, Integral) or not -(1 << 63) <= arg < 1 << 63]
    return Invalid(
        f"{request.op.name.lower()}() takes a whole number of 64 bits, not {shown((wrong or request.args)[0])}"
    )


def _new_result() -> tuple[Any, memoryview]:
    result = ffi.new("sym_result *")
    return result, memoryview(ffi.buffer(result))
