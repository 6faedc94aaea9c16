"""Connections of users who may send descriptors: none of these holds up the trio thread, nor the daemon's end.

The last close of a descriptor can take as long as its sender likes: a TCP socket lingers over data that nobody reads
(SO_LINGER, up to a day), a file of a FUSE mount waits for its server. A descriptor that is in a queue is closed with
the queue. So a packet can hang the thread that receives it, and the thread that closes the connection or its listener.
A thread that waits for a FUSE server can't even be killed, and the process does not end without it.

The first remedy is the kernel's: with SO_PASSRIGHTS off (Linux 6.16) the sender gets EPERM. Older kernels have no such
option, and launchers do send descriptors. There a look at the queue tells whether the next packet has some. Then
another process receives it (`receiver.py`), and passes on nothing but a connection that can be served. A thread waits
for that process, one of a bounded number for each uid; a uid whose threads all wait is not read. A close is such a
process's affair, too, if the queue holds descriptors.

A connection that a launcher has passed on is not the daemon's alone. The launcher's copy can receive between the look
and the recv, hold the lock that a recv takes, and clear O_NONBLOCK. So receivers receive and close all of those, and
each call says MSG_DONTWAIT.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import trio

from scheduler import receiver

log = logging.getLogger(__name__)

SO_PASSRIGHTS = 83
THREADS_PER_UID = 4
"""A thread is busy for some microseconds unless it hangs."""
_CREDENTIALS = struct.Struct("3i")
_SENDER_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size)
_MAX_BYTES = 64 << 10
"""That are taken at once from what is thrown away."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Received:
    """A packet that came by a connection."""

    data: bytes
    flags: int = 0
    """Of recvmsg(2)."""
    num_descriptors: int = 0
    fds: tuple[int, ...] = ()
    """A connection that can be served, if that was the one descriptor; its owner is the caller."""


class Receiver:
    """A process of `receiver.py`, used by one thread at a time."""

    def __init__(self) -> None:
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-S", receiver.__file__]
        standard = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)]
        try:
            self._pid = os.posix_spawn(command[0], command, {}, file_actions=standard, setsid=True)  # not for Ctrl-C
        except OSError as error:  # EAGAIN, too, and nothing is there to be asked again
            self._door.close()
            raise ConnectionAbortedError(f"no process can be made to receive: {error.strerror}") from error
        finally:
            theirs.close()

    def receive(self, connection: socket.socket, size: int) -> Received:
        """Receive as recvmsg(2) does."""
        socket.send_fds(self._door, [receiver.REQUEST.pack(size)], [connection.fileno()])
        raw, fds, _, _ = socket.recv_fds(self._door, receiver.MAX_DATA_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not raw:
            raise ConnectionAbortedError("the process that receives for it has ended")
        code, flags, num_descriptors = receiver.ANSWER.unpack_from(raw)
        if code:
            raise OSError(code, os.strerror(code))
        return Received(raw[receiver.ANSWER.size :], flags, num_descriptors, tuple(fds))

    def close(self, fd: int) -> bool:
        """Close a connection with what is in its queue. False: descriptors were, and end the process."""
        socket.send_fds(self._door, [receiver.REQUEST.pack(0)], [fd])
        os.close(fd)
        self._door.send(receiver.GO)
        return bool(self._door.recv(1))

    def let_go(self) -> int:
        """Ask nothing more. Return the pid of the process, which closes what it has, and ends."""
        self._door.close()
        return self._pid


class Threads:
    """At most THREADS_PER_UID threads of each uid, for calls that may hang, and the processes that these wait for."""

    def __init__(self) -> None:
        self._idle: list[Receiver] = []
        """Of all users: a receiver is used again as long as it has received nothing that it has to close."""
        self._is_over = False
        self._limiters: dict[int, trio.CapacityLimiter] = {}
        """Of uids that have a thread, or wait for one."""

    @property
    def num_idle(self) -> int:
        """Processes that wait for the next packet; the daemon has one descriptor for each."""
        return len(self._idle)

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

    def receive(self, connection: socket.socket, size: int) -> tuple[Received, int]:
        """Receive, on a thread. With it comes the pid of a process that has descriptors to close, or 0."""
        chosen = self._receiver()
        try:
            found = chosen.receive(connection, size)
        except ConnectionAbortedError:
            wait_for(chosen.let_go())
            raise
        except OSError:
            self._keep(chosen)
            raise
        if found.num_descriptors > len(found.fds):
            return found, chosen.let_go()
        self._keep(chosen)
        return found, 0

    def close(self, fd: int) -> None:
        """Close a connection, on a thread."""
        chosen = self._receiver()
        if chosen.close(fd):
            self._keep(chosen)
        else:
            wait_for(chosen.let_go())

    def end(self) -> None:
        """Have the processes end that wait for nothing, at the end of the daemon."""
        self._is_over = True
        while self._idle:
            wait_for(self._idle.pop().let_go())

    def _keep(self, chosen: Receiver) -> None:
        if self._is_over:
            wait_for(chosen.let_go())
        else:
            self._idle.append(chosen)

    def _receiver(self) -> Receiver:
        with suppress(IndexError):
            return self._idle.pop()
        return Receiver()


def wait_for(pid: int) -> None:
    """Wait for the end of a receiver, on a thread if it may hang."""
    os.waitpid(pid, 0)


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
        self._received: tuple[int, ...] = ()
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
        found = await self.receive_descriptors(size)
        self.dispose(found.fds)
        return found.data

    async def receive_descriptors(self, size: int) -> Received:
        """Return what is there. The caller passes its descriptors to `dispose`, or keeps them."""
        while True:
            await self.wait_readable()
            with suppress(BlockingIOError):
                if not self._is_risky:
                    return Received(self.socket.recv(size, socket.MSG_DONTWAIT))
                if not self._is_shared and (num_bytes := self._look(size)) is not None:
                    data, _, flags, _ = self.socket.recvmsg(num_bytes, 0, socket.MSG_DONTWAIT)
                    return Received(data, flags)
                found, closing = await self._threads.run(self.uid, partial(self._receive, size))
                if closing:
                    self._threads.begin(self.uid, partial(wait_for, closing))
                with self._lock:  # free: one task receives, and the connection is open
                    self._received = ()
                return found

    def _look(self, size: int) -> int | None:
        """Return how many bytes can be received here. None: descriptors come with them."""
        data, _, flags, _ = self.socket.recvmsg(size, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return None if flags & socket.MSG_CTRUNC else len(data)

    def _receive(self, size: int) -> tuple[Received, int]:
        with self._lock:
            found, closing = self._threads.receive(self.socket, size)
            self._received = found.fds
        return found, closing

    def dispose(self, fds: Iterable[int]) -> None:
        """Close connections that came by this one."""
        for fd in fds:
            self._threads.begin(self.uid, partial(self._threads.close, fd))

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
        self._threads.begin(self.uid, partial(self._close, self.socket.detach()))

    def _has_no_descriptors(self) -> bool:
        """Throw away what came without descriptors. Return whether that was all; nothing can come any more."""
        if self._is_shared or self._received:
            return False
        receiver.shut(self.socket)
        while True:
            data, sender, flags, _ = self.socket.recvmsg(
                _MAX_BYTES, _SENDER_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )
            if flags & socket.MSG_CTRUNC:
                return False
            if receiver.is_end(self.socket, data, sender):
                return True
            self.socket.recv(len(data) or 1, socket.MSG_DONTWAIT)

    def _close(self, fd: int) -> None:
        with self._lock:
            for each in (*self._received, fd):
                self._threads.close(each)


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
