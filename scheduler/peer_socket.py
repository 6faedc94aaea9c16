"""Connections of users who may send descriptors: none of these holds up the trio thread.

The last close of a descriptor can take as long as its sender likes: a TCP socket lingers over data that nobody reads
(SO_LINGER, up to a day), a file of a FUSE mount waits for its server. A descriptor that is in a queue is closed with
the queue. So a packet can hang the thread that receives it, and the thread that closes the connection or its listener.

The first remedy is the kernel's: with SO_PASSRIGHTS off (Linux 6.16) the sender gets EPERM. Older kernels have no such
option, and launchers do send descriptors. There a look at the queue tells whether the next packet has some. Then
threads receive it, of a bounded number for each uid; a uid whose threads all hang is not read. A close is a thread's
affair, too, if the queue holds descriptors.

A connection that a launcher has passed on is not the daemon's alone. The launcher's copy can receive between the look
and the recv, hold the lock that a recv takes, and clear O_NONBLOCK. So threads receive and close all of those, and each
call says MSG_DONTWAIT.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar

import trio

log = logging.getLogger(__name__)

SO_PASSRIGHTS = 83
THREADS_PER_UID = 4
"""A thread is busy for some microseconds unless it hangs."""
_NO_LINGER = struct.pack("ii", 0, 0)
_CREDENTIALS = struct.Struct("3i")
_MAX_DESCRIPTORS = 253
"""Of one packet: the kernel's SCM_MAX_FD."""
_SENDER_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size)
_ANCILLARY_BYTES = _SENDER_BYTES + socket.CMSG_SPACE(_MAX_DESCRIPTORS * array("i").itemsize)
_RECEIVE = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_MAX_BYTES = 64 << 10
"""That are taken at once from what is thrown away."""

_T = TypeVar("_T")
Ancillary = list[tuple[int, int, bytes]]


class Threads:
    """At most THREADS_PER_UID threads of each uid, for calls that may hang."""

    def __init__(self) -> None:
        self._limiters: dict[int, trio.CapacityLimiter] = {}
        """Of uids that have a thread, or wait for one."""

    async def run(self, uid: int, call: Callable[[], _T]) -> _T:
        """Return the result of `call`, which goes on alone if the caller is cancelled."""
        limiter = self._limiters.setdefault(uid, trio.CapacityLimiter(THREADS_PER_UID))
        if not limiter.available_tokens and not limiter.statistics().tasks_waiting:
            log.warning("uid %d has sent descriptors that take long to close: it has to wait", uid)
        try:
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)
        finally:
            now = limiter.statistics()
            if not now.borrowed_tokens and not now.tasks_waiting:
                self._limiters.pop(uid, None)

    def begin(self, uid: int, call: Callable[[], None]) -> None:
        """Have `call` done. The end of the daemon waits for none of these."""

        async def run() -> None:
            try:
                await self.run(uid, call)
            except Exception:  # there is no thread, and the descriptors stay open: no reason to end
                log.exception("what uid %d has sent can't be closed", uid)

        trio.lowlevel.spawn_system_task(run)


class PeerSocket:
    """A connection that the daemon has accepted, or that a launcher has passed on."""

    def __init__(
        self, connection: socket.socket | trio.socket.SocketType, threads: Threads, *, is_shared: bool = False
    ) -> None:
        """Take `connection` over. `is_shared`: another process has a copy of it, and may do with it what it likes."""
        kind = connection.type
        self.socket = socket.socket(socket.AF_UNIX, kind, fileno=connection.detach())
        self.uid: int = _CREDENTIALS.unpack(
            self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )[1]
        self._threads = threads
        self._is_shared = is_shared
        self._is_risky = is_shared or may_bring_descriptors(self.socket)
        self._lock = threading.Lock()
        """Held by the thread that receives or closes."""
        self._received: list[int] = []
        """Descriptors that no caller of `receive` has yet. Guarded by the lock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def send(self, data: bytes, ancillary: Iterable[tuple[int, int, array[int]]] = ()) -> None:
        """Send one packet, or all of a few bytes."""
        while True:
            try:
                self.socket.sendmsg([data], ancillary, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.socket)
            else:
                return

    async def wait_readable(self) -> None:
        await trio.lowlevel.wait_readable(self.socket)

    async def receive(self, size: int) -> bytes:
        """Return what is there, up to `size` bytes; descriptors are closed."""
        data, fds, _ = await self.receive_descriptors(size)
        self.dispose(fds)
        return data

    async def receive_descriptors(self, size: int) -> tuple[bytes, list[int], int]:
        """Return what is there with its descriptors, which the caller passes to `dispose`, and recvmsg's flags."""
        while True:
            await self.wait_readable()
            with suppress(BlockingIOError):
                if not self._is_risky:
                    return self.socket.recv(size, socket.MSG_DONTWAIT), [], 0
                if not self._is_shared and (num_bytes := self._look(size)) is not None:
                    data, _, flags, _ = self.socket.recvmsg(num_bytes, 0, socket.MSG_DONTWAIT)
                    return data, [], flags
                data, flags = await self._threads.run(self.uid, partial(self._receive, size))
                with self._lock:  # free: one task receives, and the connection is open
                    fds, self._received = self._received, []
                return data, fds, flags

    def _look(self, size: int) -> int | None:
        """Return how many bytes can be received here. None: descriptors come with them."""
        data, _, flags, _ = self.socket.recvmsg(size, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return None if flags & socket.MSG_CTRUNC else len(data)

    def _receive(self, size: int) -> tuple[bytes, int]:
        with self._lock:
            data, ancillary, flags, _ = self.socket.recvmsg(size, _ANCILLARY_BYTES, _RECEIVE)
            self._received += _descriptors(ancillary)
        return data, flags

    async def on_thread(self, call: Callable[[], _T]) -> _T:
        """Return the result of `call`, which does something to what came by this connection."""
        return await self._threads.run(self.uid, call)

    def dispose(self, fds: list[int]) -> None:
        """Close descriptors that came by this connection."""
        if fds:
            self._threads.begin(self.uid, partial(_close_all, fds))

    def close(self) -> None:
        """Close the connection, at once or soon."""
        if self.socket.fileno() < 0:
            return
        trio.lowlevel.notify_closing(self.socket)
        if self._lock.acquire(blocking=False):  # else a thread hangs that receives
            try:
                if not self._is_risky or self._has_no_descriptors():
                    self.socket.close()
                    return
            finally:
                self._lock.release()
        # A number, which no finalizer closes if the daemon ends before a thread is free.
        self._threads.begin(self.uid, partial(self._close, self.socket.detach(), self.socket.type))

    def _has_no_descriptors(self) -> bool:
        """Throw away what came without descriptors. Return whether that was all; nothing can come any more."""
        if self._is_shared or self._received:
            return False
        _shut(self.socket)
        while True:
            data, sender, flags, _ = self.socket.recvmsg(
                _MAX_BYTES, _SENDER_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )
            if flags & socket.MSG_CTRUNC:
                return False
            if _is_end(self.socket, data, sender):
                return True
            self.socket.recv(len(data) or 1, socket.MSG_DONTWAIT)

    def _close(self, fd: int, kind: socket.SocketKind) -> None:
        with self._lock, socket.socket(socket.AF_UNIX, kind, fileno=fd) as connection:
            _close_all(self._received)
            _shut(connection)
            with suppress(OSError):  # another process with a copy has changed it
                while True:
                    data, ancillary, _, _ = connection.recvmsg(_MAX_BYTES, _ANCILLARY_BYTES, _RECEIVE)
                    _close_all(_descriptors(ancillary))
                    if _is_end(connection, data, ancillary):
                        break


def refuse_descriptors(listening: socket.socket) -> None:
    """Have the kernel refuse descriptors that are sent to connections of `listening`, if it can (Linux 6.16)."""
    with suppress(OSError):  # `may_bring_descriptors` asks for each connection
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def may_bring_descriptors(connection: socket.socket) -> bool:
    """Return whether the kernel lets descriptors pass; a connection made before `refuse_descriptors` may have some."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) != 0
    except OSError:
        return True


def close_listening(listening: trio.socket.SocketType) -> None:
    """Close a listener on a thread: connections that wait to be accepted, and what is in their queues, go with it."""
    threading.Thread(target=os.close, args=(listening.detach(),), daemon=True).start()


def _shut(connection: socket.socket) -> None:
    """Let nothing in any more. Packets name their sender from now on."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with suppress(OSError):  # it is no longer connected
        connection.shutdown(socket.SHUT_RD)


def _is_end(connection: socket.socket, data: bytes, ancillary: Ancillary) -> bool:
    """Return whether the queue of a shut connection is empty: an empty packet has a sender, an empty queue none."""
    return not data and not (connection.type == socket.SOCK_SEQPACKET and ancillary)


def _descriptors(ancillary: Ancillary) -> list[int]:
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _close_all(fds: list[int]) -> None:
    """Close descriptors, on a thread; sockets do not linger."""
    for fd in fds:
        try:
            passed = socket.socket(fileno=fd)
        except OSError:  # it is no socket
            with suppress(OSError):  # closed it is whatever its file system says
                os.close(fd)
        else:
            with passed, suppress(OSError):
                passed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
