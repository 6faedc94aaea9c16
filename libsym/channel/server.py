"""The daemon's half of a channel. The C functions in `server.c` move requests and replies.

No method blocks. The owner of a channel decides when to look at it:

    while True:
        for request in channel.receive():
            ...                                   # sooner or later: channel.reply(request.id, ...)
        if channel.arm():
            await wait_readable(channel.doorbell)
            channel.clear_doorbell()
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn, Self

from libsym._channel import ffi, lib
from libsym.abi import ABI_VERSION, HEADER_BYTES, MAX_FRAME_BYTES, MORE, RING_BYTES, Op
from libsym.errors import Invalid, NoBuffers, ProtocolError, SymError, TooLarge

REGION_BYTES = 64 << 20
"""Target size of a region. The kernel allocates its memory on first touch, so an idle LIP costs a few pages."""

MAX_OPEN = int(lib.SYM_MAX_OPEN)
"""Limit of requests in flight on one connection, twice that of libsym. Further requests stay in the ring."""

BACKLOG_BYTES = 4 << 20
"""Limit of bytes in replies that wait for a client which does not read. Beyond this limit, the requests of that client
wait, too.
"""

MAX_TAKEN = int(lib.SYM_MAX_TAKEN)
"""Limit of requests that one `receive()` returns."""

PAYLOAD_BYTES = MAX_FRAME_BYTES - HEADER_BYTES

_TAKEN = struct.Struct("=QQ4qIIIII4x")  # struct sym_taken of server_state.h
_OPS = {int(op): op for op in Op}
_RELEASES = "it is of another release than the program's libsym"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Request(NamedTuple):
    """A system call, copied out of shared memory so that the client cannot change it."""

    op: Op
    flags: int
    id: int
    handle: int
    args: tuple[int, int, int, int]
    payload: bytes
    stream: int = 0
    """The thread or task of the program that waits for the reply: see libsym-abi(7)."""


class ServerChannel:
    """The daemon's half of one connection.

    One thread calls all methods. Any thread may write the memory of a `row()`, which stays mapped as long as a view of
    it lives. No method blocks. After `close()` replies are dropped.
    """

    def __init__(
        self, memfd: int, doorbell: int, bell: tuple[int, int], region: mmap.mmap, plan: Any, version: int
    ) -> None:
        self._doorbell = doorbell
        self._bell = bell[1]
        self._fds: tuple[int, ...] = (memfd, doorbell, bell[0])
        self._plan = plan
        new = lib.sym_server_new(ffi.from_buffer(region), plan, self._bell, version)
        self._server: Any = ffi.gc(new, lib.sym_server_free)
        self._memory: tuple[Any, mmap.mmap] | None = self._server, region
        """The C half and its memory. A thread that uses them keeps a reference, so `close()` does not free them."""
        self._inbox = memoryview(ffi.buffer(lib.sym_server_inbox(self._server), RING_BYTES))
        self._taken = memoryview(ffi.buffer(lib.sym_server_taken(self._server), _TAKEN.size * lib.SYM_MAX_TAKEN))
        self._slots = memoryview(region)[plan.slots_offset :]
        self._waiting: deque[tuple[int, int, int, tuple[int, ...], bytes]] = deque()
        self._waiting_bytes = 0
        self._broken = False
        self._closed = False
        self.when_room: dict[object, Callable[[], None]] = {}
        """Functions to call once, when no reply waits any more. Each key is the object that holds back replies until
        then.

        Each function may reply.
        """

    @classmethod
    def create(cls, vocab_size: int, *, region_bytes_limit: int = REGION_BYTES, version: int = ABI_VERSION) -> Self:
        """Make a channel with its own region, which holds as many rows of `vocab_size` logits as the limit allows.

        A region has at least 64 rows and at most 1024. `version` is the ABI version from `handshake.check_greeting`.
        """
        plan = ffi.new("sym_plan *")
        if lib.sym_region_plan(vocab_size, region_bytes_limit, plan) != 0:
            raise Invalid(f"no region can hold rows of {vocab_size} logits")
        with ExitStack() as undo:
            memfd = os.memfd_create("symphony-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, memfd)
            os.ftruncate(memfd, plan.region_bytes)
            # Else the client could shrink the file under the daemon (SIGBUS), or grow it until memory is full.
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, _SEALS)
            region = mmap.mmap(memfd, plan.region_bytes)
            doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, doorbell)
            bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            undo.pop_all()
        return cls(memfd, doorbell, bell, region, plan, version)

    @property
    def fds(self) -> tuple[int, ...]:
        """The region's memfd, the doorbell and the bell, to be sent with `handshake.welcome` as SCM_RIGHTS."""
        return self._fds

    def forget_fds(self) -> None:
        """Close the descriptors that the client has got. The daemon keeps only the doorbell."""
        for fd in self._fds:
            if fd != self._doorbell:
                os.close(fd)
        self._fds = ()

    @property
    def memory(self) -> tuple[Any, mmap.mmap]:
        """The C half and its memory. A caller that passes the address on (`libsym.channel.hot`) keeps both objects
        alive.
        """
        assert self._memory is not None
        return self._memory

    @property
    def doorbell(self) -> int:
        """Descriptor that becomes readable when the client rings."""
        return self._doorbell

    @property
    def num_slots(self) -> int:
        """Number of result slots of this connection."""
        return int(self._plan.slot_count)

    @property
    def num_held_slots(self) -> int:
        """Number of result slots that calls, or live distributions of the client, hold now."""
        return 0 if self._closed else int(lib.sym_server_held_rows(self._server))

    @property
    def num_lent_slots(self) -> int:
        """Number of result slots of calls in flight."""
        return 0 if self._closed else int(lib.sym_server_lent_rows(self._server))

    @property
    def num_given_slots(self) -> int:
        """Number of result slots that calls have taken since the connection was made."""
        return 0 if self._closed else int(lib.sym_server_given_rows(self._server))

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of all requests received, and of all replies sent, padding in the rings included."""
        if self._closed:
            return 0, 0
        return int(lib.sym_server_request_bytes(self._server)), int(lib.sym_server_reply_bytes(self._server))

    @property
    def is_full(self) -> bool:
        """Whether no more requests are taken until some have been answered.

        The limit leaves space for two batches of MAX_TAKEN: `receive` may carry out one batch, which is answered later,
        before it returns another.
        """
        return not self._closed and bool(lib.sym_server_num_open(self._server) > MAX_OPEN - 2 * MAX_TAKEN)

    @property
    def num_waiting_replies(self) -> int:
        """Number of replies that wait for space in the ring."""
        return len(self._waiting)

    def serve_by(self, function: int, connection: int, operations: int) -> None:
        """Let a `sym_serve_function` carry out requests of some operations. `operations` has a bit for each such
        operation.

        `function` and its first argument, `connection`, are addresses of objects that live as long as the channel is
        open.
        """
        function = ffi.cast("sym_serve_function *", function)
        lib.sym_server_serve_by(self._server, function, ffi.cast("void *", connection), operations)

    def receive(self, max_requests: int | None = None) -> list[Request]:
        """Take the complete requests. Requests are copied before they are checked.

        The function given to `serve_by` answers some requests first; `receive` does not return these. `max_requests`
        bounds the time of a call; the next call returns the rest. ProtocolError: a request is malformed, and the
        channel is broken for good.
        """
        if self._closed:
            return []
        self._flush()
        self._check_sane()
        if self.is_full:
            return []
        most = MAX_TAKEN if max_requests is None else min(max_requests, MAX_TAKEN)
        count = lib.sym_server_take(self._server, most, self._choked)
        if count < 0:
            self._reject()
        if count >= lib.SYM_UNSENT:
            count -= lib.SYM_UNSENT
            unsent = lib.sym_server_unsent(self._server)
            self._keep(unsent.id, 0, 0, tuple(unsent.args), b"")
        if count == 0:
            return []
        inbox = self._inbox
        # A copy, because of a bug of CPython: if a traceback with an iterator over a memoryview becomes garbage, the
        # collector clears the view while it is exported, and the process crashes.
        taken = self._taken[: count * _TAKEN.size].tobytes()
        try:
            return [
                Request(
                    _OPS[op],
                    flags,
                    call_id,
                    handle,
                    (a, b, c, d),
                    bytes(inbox[at : at + size]) if size else b"",
                    stream,
                )
                for call_id, handle, a, b, c, d, flags, op, stream, at, size in _TAKEN.iter_unpack(taken)
            ]
        except KeyError:
            return self._known(taken)

    def _known(self, taken: bytes) -> list[Request]:
        """Return the requests with known operations. Answer the others with ENOSYS."""
        known = list[Request]()
        for call_id, handle, a, b, c, d, flags, op, stream, at, size in _TAKEN.iter_unpack(taken):
            if op in _OPS:
                payload = bytes(self._inbox[at : at + size])
                known.append(Request(_OPS[op], flags, call_id, handle, (a, b, c, d), payload, stream))
            else:
                self.reply(call_id, error=SymError(f"this daemon has no operation {op}: {_RELEASES}", errno.ENOSYS))
        return known

    def arm(self) -> bool:
        """Announce that the daemon will sleep on the doorbell. False: requests have come, so do not sleep."""
        if self._closed:
            return True
        self._flush()
        self._check_sane()
        return bool(lib.sym_server_arm(self._server, self._choked))

    def clear_doorbell(self) -> None:
        """Reset the doorbell. Call this method before `receive`, which takes the requests for which the client rang."""
        if self._closed:
            return
        rc = lib.sym_server_clear_doorbell(self._doorbell)
        if rc != 0:
            raise OSError(-rc, f"reading the doorbell: {os.strerror(-rc)}")

    def reply(
        self,
        request_id: int,
        args: tuple[int, ...] = (),
        payload: bytes = b"",
        error: SymError | None = None,
        *,
        more: bool = False,
        num_rows: int = 0,
    ) -> None:
        """Answer a request. `more`: other replies follow. If the ring has no space, the reply waits in the daemon.

        The method never blocks and never fails. A payload that does not fit a frame becomes TooLarge, which ends the
        call. The client owns the `num_rows` rows of the call from now on. For a call with an error, free its rows
        first.
        """
        if self._closed or self._broken:
            return  # no client reads the reply; the socket or the next receive() shows the daemon why
        if num_rows:
            lib.sym_server_settle_rows(self._server, num_rows)
        code = 0
        if error is not None:
            code, payload = error.errno or errno.EIO, str(error).encode()[:PAYLOAD_BYTES]
        elif len(payload) > PAYLOAD_BYTES:
            code = errno.EMSGSIZE
            payload = f"the answer has {len(payload)} bytes, a message holds {PAYLOAD_BYTES}: ask for less".encode()
        flags = MORE if more and code == 0 else 0
        four = (*args, 0, 0, 0, 0)[:4]
        if self._waiting or not self._push(request_id, code, flags, four, payload):
            self._keep(request_id, code, flags, four, payload)

    def _keep(self, request_id: int, code: int, flags: int, args: tuple[int, ...], payload: bytes) -> None:
        """Queue a reply until the ring has space."""
        self._waiting.append((request_id, code, flags, args, payload))
        self._waiting_bytes += HEADER_BYTES + len(payload)
        self._flush()

    def want_slots(self) -> None:
        """Ask the client to ring when it frees slots. The caller then looks at the slots again, because the client may
        have freed slots just before.
        """
        if not self._closed:
            lib.sym_server_want_slots(self._server)

    def take_rows(self, num_rows: int) -> int:
        """Take consecutive result slots; return the first.

        NoBuffers: not enough consecutive slots are free now. TooLarge: the connection has fewer slots.
        """
        if num_rows > self.num_slots:
            raise TooLarge(
                f"{num_rows} rows, the connection has {self.num_slots} result slots: use rows='last', or fewer tokens"
            )
        assert num_rows >= 1, num_rows
        assert not self._closed
        first = lib.sym_server_take_rows(self._server, num_rows)
        if first < 0:
            raise NoBuffers(
                f"no {num_rows} of the connection's {self.num_slots} result slots are free: drop some Dists first"
            )
        return int(first)

    def row(self, slot: int) -> memoryview[float]:
        """Return the memory of a result slot: `vocab_size` writable float32 logits."""
        assert 0 <= slot < self.num_slots, slot
        start = slot * self._plan.slot_bytes
        row: Any = self._slots[start : start + self._plan.vocab_size * 4].cast("f")
        return memoryview(row)

    def free_rows(self, first: int, num_rows: int) -> None:
        """Free the rows of a failed call."""
        if not self._closed:
            lib.sym_server_free_rows(self._server, first, num_rows)

    def close(self) -> None:
        """Wake all waiters of the client, because the daemon ends the connection. Rows that other threads write stay
        mapped.

        The memory is dropped immediately. Otherwise a broken connection would keep its memory until the collector runs.
        """
        if self._closed:
            return
        self._closed = True
        lib.sym_server_close(self._server)
        self._waiting.clear()
        self._waiting_bytes = 0
        self.forget_fds()
        os.close(self._doorbell)
        os.close(self._bell)
        self._memory = self._server = None
        self._inbox = self._taken = self._slots = memoryview(b"")
        self.when_room = {}  # drops the functions of the owner, which may refer to this channel

    @property
    def _choked(self) -> bool:
        """Whether no more requests are taken because too many replies wait. The client rings when it has read some
        replies.
        """
        return self._waiting_bytes > BACKLOG_BYTES

    def _check_sane(self) -> None:
        if self._broken:
            raise ProtocolError("the client broke the rules of its ring: the connection has to be closed")

    def _push(self, request_id: int, code: int, flags: int, args: tuple[int, ...], payload: bytes) -> bool:
        rc = lib.sym_server_push(self._server, request_id, code, flags, *args, payload, len(payload))
        self._broken |= rc < 0
        return bool(rc == 0)

    def _flush(self) -> None:
        """Send waiting replies, oldest first. If some still wait, ask the client to ring."""
        if not self._waiting or self._broken:
            return
        self._send_waiting()
        if self._waiting:
            lib.sym_server_set_backlog(self._server, 1)
            self._send_waiting()  # the client may have read replies before it could see the flag
        if not self._waiting:
            lib.sym_server_set_backlog(self._server, 0)
            held_back, self.when_room = self.when_room, {}
            for go_on in held_back.values():
                go_on()

    def _send_waiting(self) -> None:
        while self._waiting and self._push(*self._waiting[0]):
            self._waiting_bytes -= HEADER_BYTES + len(self._waiting.popleft()[4])

    def _reject(self) -> NoReturn:
        self._broken = True
        raise ProtocolError(
            "the client sent a malformed request: it is no frame, or the ring's tail is not in the ring"
        )
