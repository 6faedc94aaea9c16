"""The LIP's half of a channel: any number of threads may be inside `call()` at once. The waiting is in `client.c`."""

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
    """The LIP's half of a connection, for all of its threads."""

    def __init__(self, connection: socket.socket, memfd: int, doorbell: int, bell: int, name: str) -> None:
        """Takes over the four descriptors; `name` is how messages call the daemon: the path of its socket."""
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
        self._results: list[tuple[Any, memoryview]] = []  # not in use; append and pop are atomic
        self.owner_pid = os.getpid()
        self.vocab_size: int = lib.sym_client_vocab_size(client)
        self.num_slots: int = lib.sym_client_slot_count(client)
        self.slot_bytes: int = lib.sym_client_slot_bytes(client)
        self.named_files: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """Open files that have a name, by their handles."""
        self.vocabulary: list[bytes] | None = None
        """The bytes of each token, once they were asked for."""
        self.token_texts: Any = None
        """The same as C reads them, a `TokenTexts`: see `libsym.rows.stops`."""

    def run(self, script: Script[T]) -> T:
        """Runs the calls of a script, one after the other, and gives what it returns."""
        try:
            call = next(script)
            while True:
                try:
                    reply = self.perform(call)
                except BaseException as error:  # noqa: BLE001 - the script may clean up, and raises it again
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
        """Sends a request and waits for its reply. An exception from a signal handler (Ctrl-C) ends the wait."""
        op, flags, handle, args, payload = request
        try:
            room = self._results.pop()
        except IndexError:
            room = _new_result()
        result, view = room
        payload_bytes = len(payload)
        try:
            rc = _call(self._client, result, op, flags, handle, *args, payload, payload_bytes)
            while rc == _INTERRUPTED:  # at least every 100 ms: here Python runs its signal handlers
                rc = lib.sym_result_wait(result, payload, payload_bytes)
            if rc:
                raise self.failure(rc, payload_bytes)  # noqa: TRY301 - below, too, what was begun is dropped
            reply = Reply.of_result(result, view, self)
        except BaseException as error:
            lib.sym_result_drop(result)  # not when the traceback is forgotten: now
            if isinstance(error, (OverflowError, TypeError)):
                raise wrong_number(request) from error
            raise
        self._results.append(room)
        if reply.error is not None:
            try:
                raise reply.error
            finally:
                del reply  # the error holds this frame by its traceback, and would be held by it
        return reply

    def new_call(self, request: Call) -> Any:
        """A sym_call that is not sent yet; dropping it cancels it."""
        try:
            new = lib.sym_call_new(self._client, request.op, request.flags, request.handle, *request.args)
        except (OverflowError, TypeError) as error:
            raise wrong_number(request) from error
        if new == ffi.NULL:
            raise self.failure(-errno.ENOTCONN)
        return ffi.gc(new, lib.sym_call_drop)

    def new_loop(self) -> Any:
        """A sym_event_loop: what an event loop waits with."""
        new = lib.sym_event_loop_new(self._client)
        if new == ffi.NULL:
            if ffi.errno == errno.ENOTCONN:
                raise self.failure(-errno.ENOTCONN)
            raise SymError(f"no descriptors for an event loop: {os.strerror(ffi.errno)}", ffi.errno)
        return ffi.gc(new, lib.sym_event_loop_drop)

    def close_later(self, handle: int) -> None:
        """Closes a handle together with the next call. Never waits, never raises: for finalizers."""
        lib.sym_client_tell(self._client, Op.KV_CLOSE, handle, 0)

    def close_soon(self, handle: int) -> None:
        """Closes a handle without waiting for it, now if there is room in the ring. Never raises."""
        lib.sym_client_tell(self._client, Op.KV_CLOSE, handle, 1)

    def unlock_soon(self, handle: int) -> None:
        """Gives a lock up without waiting for it, now if there is room in the ring. Never raises."""
        lib.sym_client_tell(self._client, Op.KV_UNLOCK, handle, 1)

    def stream(self, request: Call) -> Stream:
        """Sends a request that has several replies. The object takes them, one after the other."""
        return Stream(self, request)

    @property
    def alive(self) -> bool:
        """False once the daemon's end has been noticed, or after `close()`."""
        return not self._client.dead and self.owner_pid == os.getpid()

    def daemon_is_there(self) -> bool:
        """As `alive`, but looks at the connection: nobody may have called since the daemon went."""
        return self.alive and lib.sym_client_gone(self._client) == 0

    def close(self) -> None:
        """Ends the connection. Threads that wait get NotConnected; rows that are still viewed stay readable."""
        lib.sym_client_close(self._client)

    def disown(self) -> None:
        """In the child of a fork: lets go of the parent's socket."""
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
        where = "" if "SYMPHONY_PROGRAM" in os.environ else f" at {self.name}"  # that of a launched program is its own
        remedy = "start it with `symphony serve`, then run the program again, or sym.connect() in it"
        return NotConnected(f"the daemon{where} is gone: {remedy}")


def _nothing(_reply: Reply) -> None:
    """Is told of a reply and does nothing."""


class Stream:
    """The replies to one request, for one thread at a time. Dropped before its end it is cancelled."""

    def __init__(self, channel: ClientChannel, request: Call) -> None:
        self._channel = channel
        self._payload: bytes | None = request.payload
        self._call = channel.new_call(request)
        self._found: Any = ffi.new("sym_tokens *")
        self._is_awaited = False
        self.is_over = False
        """The last reply was given out, or an error was."""
        self._is_closed = False

    def start(self) -> None:
        """Sends the request now, not only when the first reply is waited for."""
        payload = self._payload or b""
        rc = lib.sym_call_start(self._call, payload, len(payload))
        while rc == _INTERRUPTED:
            rc = lib.sym_call_start(self._call, payload, len(payload))
        if rc:
            self.close()
            raise self._channel.failure(rc, len(payload))
        self._payload = None

    def next(self, take: Callable[[Reply], None] = _nothing) -> Reply:
        """The next reply, as soon as it is there; `reply.more` says whether others follow. Raises the call's error.

        Ctrl-C ends the wait, not the call: what comes meanwhile is kept, and what `take` was not told of comes again.
        """
        # A lock could be taken and then be nobody's, by Ctrl-C; no other thread runs between these two lines.
        if self._is_awaited:
            raise Invalid("another thread waits for what comes next: one at a time")
        self._is_awaited = True
        try:
            return self._next(take)
        finally:
            self._is_awaited = False
            if self._is_closed:
                self._let_go()

    def tokens(self, take: Callable[[list[int], int, int], None]) -> bool:
        """Of a generation: the tokens of all replies that are there, as soon as one is. False: `next` has what comes.

        It is `next` for what comes thousands of times: after a step has swept the caches, each line costs a microsecond
        or more. `take` is told the tokens, and the entries of the file with the first and the last of the replies.
        """
        if self._is_awaited or self.is_over or self._payload is not None:
            return False
        self._is_awaited = True
        try:
            call, found = self._call, self._found
            while (rc := lib.sym_call_tokens(call, found)) == _INTERRUPTED:
                pass
            if rc or not found.num_replies:
                return False  # `next` meets it again
            take(ffi.unpack(found.tokens, found.num_tokens), found.first_entries, found.entries)
            lib.sym_call_forget(call, found.num_replies)  # with nothing in between that Ctrl-C could interrupt
            return True
        finally:
            self._is_awaited = False
            if self._is_closed:
                self._let_go()

    def cancel(self) -> None:
        """Asks the daemon to end the call. What it had sent before still comes, and then the end, or ECANCELED."""
        if not self.is_over:
            lib.sym_call_cancel(self._call)

    def close(self) -> None:
        """Ends the call for this side: cancelled if it is not over, and nothing more comes."""
        self.cancel()
        self.is_over = self._is_closed = True
        self._let_go()

    def _let_go(self) -> None:
        """Of a call that was closed, unless somebody waits for its reply, who will do it then.

        One that is merely over goes with this object: another thread may just be cancelling it.
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
        if answer == ffi.NULL:  # the last one was taken, and Ctrl-C came before that could be noted
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
                del reply  # the error holds this frame by its traceback, and would be held by it
        return reply


def wrong_number(request: Call) -> Invalid:
    """The error of arguments that C does not take."""
    wrong = [arg for arg in request.args if not isinstance(arg, Integral) or not -(1 << 63) <= arg < 1 << 63]
    return Invalid(
        f"{request.op.name.lower()}() takes a whole number of 64 bits, not {shown((wrong or request.args)[0])}"
    )


def _new_result() -> tuple[Any, memoryview]:
    result = ffi.new("sym_result *")
    return result, memoryview(ffi.buffer(result))
