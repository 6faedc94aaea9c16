"""The LIP's half of a channel: any number of threads may be inside `call()` at once. The waiting is in `client.c`."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from libsym._channel import ffi, lib
from libsym.abi import HEADER_BYTES, MAX_FRAME_BYTES, Op
from libsym.errors import BadHandle, Invalid, NotConnected, ProtocolError, SymError, TooLarge, error_for


class Reply:
    """What a call brought. It owns its result slots and its handle until `rows()` or `claim()` takes them over."""

    __slots__ = ("_call", "_channel", "args", "payload")

    def __init__(self, channel: ClientChannel, call: Any) -> None:
        self._channel = channel
        self._call = call
        self.args: list[int] = ffi.unpack(call.args, 4)
        self.payload: bytes = ffi.unpack(call.payload, call.payload_bytes) if call.payload_bytes else b""

    def claim(self) -> int:
        """The handle that the call opened; the caller closes it from now on."""
        self._call.claimed = 1
        return self.args[0]

    def rows(self) -> memoryview:
        """The result slots as read-only bytes. They are free again when the last view made of this is gone."""
        first_row = lib.sym_call_rows(self._call)
        if first_row == ffi.NULL:
            raise ProtocolError(f"the daemon named result slots that do not exist: {self.args[:2]}")
        call = self._call
        # buffer -> owner -> closure -> call: the slots are released by the call's own destructor, exactly once.
        owner = ffi.gc(first_row, lambda _row: call)
        return memoryview(ffi.buffer(owner, self.args[1] * self._channel.slot_bytes)).toreadonly()


class ClientChannel:
    """The LIP's half of a connection, for all of its threads."""

    def __init__(self, connection: socket.socket, memfd: int, doorbell: int, name: str) -> None:
        """Takes over the three descriptors; `name` is how messages call the daemon: the path of its socket."""
        self.name = name
        client = lib.sym_client_new(memfd, os.fstat(memfd).st_size, connection.fileno(), doorbell)
        if client == ffi.NULL:
            connection.close()
            os.close(doorbell)
            os.close(memfd)
            raise ProtocolError(f"the region that the daemon at {name} sent cannot be used: {os.strerror(ffi.errno)}")
        connection.detach()
        os.close(memfd)
        self._client: Any = ffi.gc(client, lib.sym_client_drop)
        self.owner_pid = os.getpid()
        self.vocab_size: int = lib.sym_client_vocab_size(client)
        self.num_slots: int = lib.sym_client_slot_count(client)
        self.slot_bytes: int = lib.sym_client_slot_bytes(client)

    def call(
        self,
        op: Op,
        *,
        flags: int = 0,
        handle: int = 0,
        args: tuple[int, int, int, int] = (0, 0, 0, 0),
        payload: bytes = b"",
    ) -> Reply:
        """Sends a request and waits for its reply. An exception from a signal handler (Ctrl-C) ends the wait."""
        try:
            new = lib.sym_call_new(self._client, op, flags, handle, *args)
        except (OverflowError, TypeError) as error:
            raise Invalid(f"{op.name.lower()}() takes a whole number of 64 bits, not {args[0]!r}") from error
        if new == ffi.NULL:
            raise self._failure(-errno.ENOTCONN, 0)
        call = ffi.gc(new, lib.sym_call_drop)
        try:
            rc = lib.sym_call_run(call, payload, len(payload))
            while rc == -errno.EINTR:  # at least every 100 ms: here Python runs its signal handlers
                rc = lib.sym_call_run(call, payload, len(payload))
            self._check(rc, len(payload))
            reply = Reply(self, call)
        except BaseException:
            ffi.release(call)  # not when the traceback is forgotten: now
            raise
        if call.err != 0:
            raise error_for(call.err, reply.payload.decode(errors="replace"))
        return reply

    def close_later(self, handle: int) -> None:
        """Closes a handle together with the next call. Never waits, never raises: for finalizers."""
        lib.sym_client_close_later(self._client, handle)

    @property
    def alive(self) -> bool:
        """False once the daemon's end has been noticed, or after `close()`."""
        return lib.sym_client_dead(self._client) == 0 and self.owner_pid == os.getpid()

    def close(self) -> None:
        """Ends the connection. Threads that wait get NotConnected; rows that are still viewed stay readable."""
        lib.sym_client_close(self._client)

    def disown(self) -> None:
        """In the child of a fork: lets go of the parent's socket."""
        lib.sym_client_disown(self._client)

    def _check(self, rc: int, payload_bytes: int) -> None:
        if rc != 0:
            raise self._failure(rc, payload_bytes)

    def _failure(self, rc: int, payload_bytes: int) -> SymError:
        if rc == -errno.EMSGSIZE:
            return TooLarge(
                f"a message of {payload_bytes} bytes: {MAX_FRAME_BYTES - HEADER_BYTES} is the most, use several calls"
            )
        if rc == -errno.EBADF:
            return BadHandle(
                f"this belongs to process {self.owner_pid}, the parent of this one by fork: open it again here"
            )
        reason = lib.sym_client_dead(self._client)
        if reason == errno.ESHUTDOWN:
            return NotConnected(f"the connection to {self.name} was closed by this program: use sym.connect()")
        if reason in (errno.EPROTO, errno.ENOMEM):
            return ProtocolError(f"a reply of the daemon at {self.name} could not be read: {os.strerror(reason)}")
        return NotConnected(f"the daemon at {self.name} is gone: start it with `symphony serve`, then sym.connect()")
