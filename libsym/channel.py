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
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from libsym._channel import ffi, lib
from libsym.abi import FRAME_ALIGN, HEADER_BYTES, MAX_FRAME_BYTES, RING_BYTES, Op
from libsym.errors import Invalid, NoBuffers, ProtocolError, SymError, TooLarge

REGION_BYTES = 64 << 20
"""Aim for the size of a region. It is committed as it is touched: an idle LIP costs a few pages."""

BACKLOG_BYTES = 4 << 20
"""So many bytes of replies may wait for a client that does not read; then its requests wait, too."""

PAYLOAD_BYTES = MAX_FRAME_BYTES - HEADER_BYTES

_REQUEST = struct.Struct("=IHHIIQQqqqq")
_OPS = {int(op): op for op in Op}
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Request:
    """One system call, copied out of shared memory: nobody can change it any more."""

    op: Op
    flags: int
    id: int
    handle: int
    args: tuple[int, int, int, int]
    payload: bytes


class ServerChannel:
    """The daemon's half of one connection.

    All methods belong to one thread, except that the memory behind `row()` may be written by any, and stays mapped as
    long as a view of it lives. Nothing blocks. After `close()` replies are dropped: the client is gone.
    """

    def __init__(self, memfd: int, doorbell: int, region: mmap.mmap, plan: Any) -> None:
        self._memfd = memfd
        self._doorbell = doorbell
        self._region = region
        self._plan = plan
        self._server: Any = ffi.gc(lib.sym_server_new(ffi.from_buffer(region), plan), lib.sym_server_free)
        self._inbox = memoryview(ffi.buffer(lib.sym_server_inbox(self._server), RING_BYTES))
        self._inbox_at = self._inbox_end = 0  # frames between the two are copied out and not yet looked at
        self._slots = memoryview(region)[plan.slots_offset :]
        self._waiting: deque[tuple[int, int, tuple[int, int, int, int], bytes]] = deque()
        self._waiting_bytes = 0
        self._broken = False
        self._closed = False

    @classmethod
    def create(cls, vocab_size: int, *, region_bytes_limit: int = REGION_BYTES) -> Self:
        """A channel with a region of its own: as many rows of `vocab_size` logits as the limit allows (64 to 1024)."""
        plan = ffi.new("sym_plan *")
        if lib.sym_region_plan(vocab_size, region_bytes_limit, plan) != 0:
            raise Invalid(f"no region can hold rows of {vocab_size} logits")
        memfd = os.memfd_create("symphony-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memfd, plan.region_bytes)
            # The client must not be able to shrink the file under us (SIGBUS) or to fill the memory with it.
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, _SEALS)
            region = mmap.mmap(memfd, plan.region_bytes)
            doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            os.close(memfd)
            raise
        return cls(memfd, doorbell, region, plan)

    @property
    def fds(self) -> tuple[int, int]:
        """The region's memfd and the doorbell, to be sent with `handshake.WELCOME` as SCM_RIGHTS."""
        return self._memfd, self._doorbell

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
        return int(lib.sym_server_held_rows(self._server))

    @property
    def num_waiting_replies(self) -> int:
        """Replies that did not fit the ring and wait for the client to read."""
        return len(self._waiting)

    def receive(self, max_requests: int | None = None) -> list[Request]:
        """Requests that are complete, copied out before they are looked at. A malformed one: ProtocolError, for good.

        `max_requests` bounds the time that this takes; what is left comes with the next call.
        """
        if self._closed:
            return []
        self._flush()
        self._check_sane()
        if self._inbox_at == self._inbox_end and not self._choked:
            num_bytes = lib.sym_server_receive(self._server)
            self._broken = num_bytes < 0
            self._check_sane()
            self._inbox_at, self._inbox_end = 0, num_bytes
        requests: list[Request] = []
        while self._inbox_at < self._inbox_end and len(requests) != max_requests:
            requests.append(self._next_request())
        return requests

    def arm(self) -> bool:
        """Announces that the daemon will sleep on the doorbell. False: there is something to receive, do not sleep."""
        if self._closed:
            return True
        self._flush()
        self._check_sane()
        if self._inbox_at < self._inbox_end:
            return False
        return bool(lib.sym_server_arm(self._server, self._choked))

    def clear_doorbell(self) -> None:
        """Makes the doorbell unreadable again, before what it rang for is received."""
        if self._closed:
            return
        rc = lib.sym_server_clear_doorbell(self._doorbell)
        if rc != 0:
            raise OSError(-rc, f"reading the doorbell: {os.strerror(-rc)}")

    def reply(
        self, request_id: int, args: tuple[int, ...] = (), payload: bytes = b"", error: SymError | None = None
    ) -> None:
        """Answers a request. Never blocks and never fails: what finds no room in the ring waits on this side.

        A payload beyond a frame becomes TooLarge. Rows that the call took stay taken: with an error, free them first.
        """
        if self._closed or self._broken:
            return  # nobody is there to read it; the socket, or the next receive(), says so to the daemon
        code = 0
        if error is not None:
            code, payload = error.errno or errno.EIO, str(error).encode()[:PAYLOAD_BYTES]
        elif len(payload) > PAYLOAD_BYTES:
            code = errno.EMSGSIZE
            payload = f"the answer has {len(payload)} bytes, a message holds {PAYLOAD_BYTES}: ask for less".encode()
        a, b, c, d = (*args, 0, 0, 0, 0)[:4]
        four = (a, b, c, d)
        if self._waiting or not self._push(request_id, code, four, payload):
            self._waiting.append((request_id, code, four, payload))
            self._waiting_bytes += HEADER_BYTES + len(payload)
            self._flush()

    def take_rows(self, num_rows: int) -> int:
        """The first of `num_rows` consecutive result slots. NoBuffers: all held now; TooLarge: more than there are."""
        if num_rows > self.num_slots:
            raise TooLarge(
                f"{num_rows} rows, the connection has {self.num_slots} result slots: use rows='last', or fewer tokens"
            )
        assert num_rows >= 1, num_rows
        first = lib.sym_server_take_rows(self._server, num_rows)
        if first < 0:
            raise NoBuffers(
                f"no {num_rows} of the connection's {self.num_slots} result slots are free: drop some Dists first"
            )
        return int(first)

    def row(self, slot: int) -> memoryview:
        """The logits of a result slot: float32, writable, `vocab_size` long."""
        assert 0 <= slot < self.num_slots, slot
        start = slot * self._plan.slot_bytes
        row: Any = self._slots[start : start + self._plan.vocab_size * 4].cast("f")
        return memoryview(row)

    def free_rows(self, first: int, num_rows: int) -> None:
        """Gives back rows of a call that failed."""
        lib.sym_server_free_rows(self._server, first, num_rows)

    def close(self) -> None:
        """Tells every waiter of the client that the daemon is gone. Rows still being written stay mapped."""
        if self._closed:
            return
        self._closed = True
        lib.sym_server_close(self._server)
        self._waiting.clear()
        self._waiting_bytes = 0
        os.close(self._memfd)
        os.close(self._doorbell)

    @property
    def _choked(self) -> bool:
        """So many replies wait that no more requests are taken; the client rings when it has read some."""
        return self._waiting_bytes > BACKLOG_BYTES

    def _check_sane(self) -> None:
        if self._broken:
            raise ProtocolError("the client broke the rules of its ring: the connection has to be closed")

    def _push(self, request_id: int, code: int, args: tuple[int, ...], payload: bytes) -> bool:
        rc = lib.sym_server_push(self._server, request_id, code, *args, payload, len(payload))
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

    def _send_waiting(self) -> None:
        while self._waiting and self._push(*self._waiting[0]):
            self._waiting_bytes -= HEADER_BYTES + len(self._waiting.popleft()[3])

    def _next_request(self) -> Request:
        at = self._inbox_at
        frame_bytes, op, zero, flags, zero2, call_id, handle, a, b, c, d = _REQUEST.unpack_from(self._inbox, at)
        end = at + (frame_bytes + FRAME_ALIGN - 1) // FRAME_ALIGN * FRAME_ALIGN
        if not HEADER_BYTES <= frame_bytes <= MAX_FRAME_BYTES or end > self._inbox_end:
            self._reject(f"a frame of {frame_bytes} bytes where {self._inbox_end - at} are there")
        if op not in _OPS or zero or zero2:
            self._reject(f"operation {op}, reserved fields {zero} and {zero2}")
        self._inbox_at = end
        payload = bytes(self._inbox[at + HEADER_BYTES : at + frame_bytes])
        return Request(_OPS[op], flags, call_id, handle, (a, b, c, d), payload)

    def _reject(self, what: str) -> NoReturn:
        self._broken = True
        raise ProtocolError(f"the client sent a malformed request: {what}")
