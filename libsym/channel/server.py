"""The daemon's half of a channel: what the C in `server.c` moves, as requests, replies and errors.

Nothing in it blocks, and its owner decides when to look:

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
"""Aim for the size of a region. It is committed as it is touched: an idle LIP costs a few pages."""

MAX_OPEN = int(lib.SYM_MAX_OPEN)
"""Requests of one connection under way at once: twice what the library has. More stay in its ring."""

BACKLOG_BYTES = 4 << 20
"""Bytes of replies that may wait for a client that does not read; then its requests wait, too."""

MAX_TAKEN = int(lib.SYM_MAX_TAKEN)
"""Requests that one `receive()` gives at most."""

PAYLOAD_BYTES = MAX_FRAME_BYTES - HEADER_BYTES

_TAKEN = struct.Struct("=QQ4qIIIII4x")  # struct sym_taken of server_state.h
_OPS = {int(op): op for op in Op}
_RELEASES = "it is of another release than the program's libsym"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Request(NamedTuple):
    """A system call, copied out of shared memory: nobody can change it any more."""

    op: Op
    flags: int
    id: int
    handle: int
    args: tuple[int, int, int, int]
    payload: bytes
    stream: int = 0
    """Thread or task of the program that waits for the answer: see libsym-abi(7)."""


class ServerChannel:
    """The daemon's half of one connection.

    All methods belong to one thread, except that the memory behind `row()` may be written by any, and stays mapped as
    long as a view of it lives. Nothing blocks. After `close()` replies are dropped: the client is gone.
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
        """Memory that other threads hold on to while this one may close the channel."""
        self._inbox = memoryview(ffi.buffer(lib.sym_server_inbox(self._server), RING_BYTES))
        self._taken = memoryview(ffi.buffer(lib.sym_server_taken(self._server), _TAKEN.size * lib.SYM_MAX_TAKEN))
        self._slots = memoryview(region)[plan.slots_offset :]
        self._waiting: deque[tuple[int, int, int, tuple[int, ...], bytes]] = deque()
        self._waiting_bytes = 0
        self._broken = False
        self._closed = False
        self.when_room: dict[object, Callable[[], None]] = {}
        """Functions, by the object that holds back replies: called once, when none waits any more. Each may reply."""

    @classmethod
    def create(cls, vocab_size: int, *, region_bytes_limit: int = REGION_BYTES, version: int = ABI_VERSION) -> Self:
        """A channel with a region of its own: as many rows of `vocab_size` logits as the limit allows (64 to 1024).

        `version`: of the ABI, as `handshake.check_greeting` found it.
        """
        plan = ffi.new("sym_plan *")
        if lib.sym_region_plan(vocab_size, region_bytes_limit, plan) != 0:
            raise Invalid(f"no region can hold rows of {vocab_size} logits")
        with ExitStack() as undo:
            memfd = os.memfd_create("symphony-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, memfd)
            os.ftruncate(memfd, plan.region_bytes)
            # The client must not be able to shrink the file under us (SIGBUS) or to fill the memory with it.
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
        """Close the descriptors that were sent: this side needs the doorbell alone."""
        for fd in self._fds:
            if fd != self._doorbell:
                os.close(fd)
        self._fds = ()

    @property
    def memory(self) -> tuple[Any, mmap.mmap]:
        """The C half, and what it works on: whoever hands its address to `libsym.channel.hot` keeps this."""
        assert self._memory is not None
        return self._memory

    @property
    def doorbell(self) -> int:
        """Readable when the client has rung."""
        return self._doorbell

    @property
    def vocab_size(self) -> int:
        return int(self._plan.vocab_size)

    @property
    def num_slots(self) -> int:
        """Result rows that this connection can hold at once."""
        return int(self._plan.slot_count)

    @property
    def num_held_slots(self) -> int:
        """Result rows that calls or live distributions of the client hold now."""
        return 0 if self._closed else int(lib.sym_server_held_rows(self._server))

    @property
    def num_lent_slots(self) -> int:
        """Slots that calls under way have: sooner or later such a slot is free, or the client's."""
        return 0 if self._closed else int(lib.sym_server_lent_rows(self._server))

    @property
    def num_given_slots(self) -> int:
        """Result rows that calls took, since the connection was made."""
        return 0 if self._closed else int(lib.sym_server_given_rows(self._server))

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Of the requests that came and of the replies that went, as they took room in the rings."""
        if self._closed:
            return 0, 0
        return int(lib.sym_server_request_bytes(self._server)), int(lib.sym_server_reply_bytes(self._server))

    @property
    def is_full(self) -> bool:
        """Whether no more requests are taken: look again when some have been answered.

        As many as `receive` gives at most may be carried out before them, and be answered later.
        """
        return not self._closed and bool(lib.sym_server_num_open(self._server) > MAX_OPEN - 2 * MAX_TAKEN)

    @property
    def num_waiting_replies(self) -> int:
        """Replies that did not fit the ring and wait for the client to read."""
        return len(self._waiting)

    def serve_by(self, function: int, connection: int, operations: int) -> None:
        """Have requests of some operations, a bit for each, carried out by a `sym_serve_function` where it can.

        `connection` is its first argument. Both are addresses; what they lead to lives as long as the channel is open.
        """
        function = ffi.cast("sym_serve_function *", function)
        lib.sym_server_serve_by(self._server, function, ffi.cast("void *", connection), operations)

    def receive(self, max_requests: int | None = None) -> list[Request]:
        """Requests that are complete, copied out before they are looked at. A malformed one: ProtocolError, for good.

        Requests that `serve_by`'s function carries out are answered, and not among them. `max_requests` bounds the time
        that this takes; what is left comes with the next call.
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
        # A copy: an iterator over a memoryview, in a traceback that becomes garbage, has the collector crash the
        # process (CPython clears the view while it is exported).
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
        """The requests whose operation there is; all others are answered: their client is newer, or older."""
        known = list[Request]()
        for call_id, handle, a, b, c, d, flags, op, stream, at, size in _TAKEN.iter_unpack(taken):
            if op in _OPS:
                payload = bytes(self._inbox[at : at + size])
                known.append(Request(_OPS[op], flags, call_id, handle, (a, b, c, d), payload, stream))
            else:
                self.reply(call_id, error=SymError(f"this daemon has no operation {op}: {_RELEASES}", errno.ENOSYS))
        return known

    def arm(self) -> bool:
        """Announces that the daemon will sleep on the doorbell. False: there is something to receive, do not sleep."""
        if self._closed:
            return True
        self._flush()
        self._check_sane()
        return bool(lib.sym_server_arm(self._server, self._choked))

    def clear_doorbell(self) -> None:
        """Makes the doorbell unreadable again, before what it rang for is received."""
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
        """Answers a request; with `more` it is not the last answer. What finds no room in the ring waits on this side.

        It never blocks and never fails. A payload beyond a frame becomes TooLarge, which ends the call. `num_rows` that
        the call took are the client's from now on; with an error, free them first.
        """
        if self._closed or self._broken:
            return  # nobody is there to read it; the socket, or the next receive(), says so to the daemon
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
        """Let a reply wait for room in the ring."""
        self._waiting.append((request_id, code, flags, args, payload))
        self._waiting_bytes += HEADER_BYTES + len(payload)
        self._flush()

    def want_slots(self) -> None:
        """Has the client ring when it frees slots. Look once more after this: it may have freed some just before."""
        if not self._closed:
            lib.sym_server_want_slots(self._server)

    def take_rows(self, num_rows: int) -> int:
        """The first of `num_rows` consecutive result slots. NoBuffers: all held now; TooLarge: more than there are."""
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
        """The logits of a result slot: float32, writable, `vocab_size` long."""
        assert 0 <= slot < self.num_slots, slot
        start = slot * self._plan.slot_bytes
        row: Any = self._slots[start : start + self._plan.vocab_size * 4].cast("f")
        return memoryview(row)

    def free_rows(self, first: int, num_rows: int) -> None:
        """Gives back rows of a call that failed."""
        if not self._closed:
            lib.sym_server_free_rows(self._server, first, num_rows)

    def close(self) -> None:
        """Tells every waiter of the client that the daemon is gone. Rows still being written stay mapped.

        The memory goes now, not when the collector finds this object in the garbage of a connection that broke.
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
        self.when_room = {}  # its owner's: no cycle stays behind

    @property
    def _choked(self) -> bool:
        """Whether replies wait that keep requests from being taken; the client rings when it has read some."""
        return self._waiting_bytes > BACKLOG_BYTES

    def _check_sane(self) -> None:
        if self._broken:
            raise ProtocolError("the client broke the rules of its ring: the connection has to be closed")

    def _push(self, request_id: int, code: int, flags: int, args: tuple[int, ...], payload: bytes) -> bool:
        rc = lib.sym_server_push(self._server, request_id, code, flags, *args, payload, len(payload))
        self._broken |= rc < 0
        return bool(rc == 0)

    def _flush(self) -> None:
        """Sends what waits, oldest first, and tells the client to ring if some of it still has to wait."""
        if not self._waiting or self._broken:
            return
        self._send_waiting()
        if self._waiting:
            lib.sym_server_set_backlog(self._server, 1)
            self._send_waiting()  # the client may have made room before it could see the flag
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
