"""Connections of peers that may send descriptors. No descriptor delays the trio thread, or the daemon's end.

The last close of a descriptor can take as long as its sender likes. A TCP socket lingers over unread data (SO_LINGER,
up to a day). A file of a FUSE mount waits for its server. Closing a queue closes the descriptors in it. So a packet can
hang the thread that receives it, and the thread that closes the connection or its listener. A thread that waits for a
FUSE server cannot even be killed, and a process does not end before all its threads do.

Since Linux 6.16, the kernel can refuse descriptors: with SO_PASSRIGHTS off, the sender gets EPERM. Older kernels lack
the option, and launchers need to send descriptors. On such kernels, the daemon peeks at the queue to learn whether the
next packet has descriptors. If so, another process receives the packet (`receiver.py`), and passes on only a connection
that can be served. A thread waits for that process. Each uid has a bounded number of such threads. If all of them wait,
the daemon does not read from the uid. If a queue has descriptors, a receiver process also closes the connection.

The launcher that passed on a connection may keep a copy. With this copy, the launcher can receive between the peek and
the recv, hold the lock that a recv takes, and clear O_NONBLOCK. So receivers receive from all passed connections, and
close them. Each of their recv calls has MSG_DONTWAIT.
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

from scheduler.wire import receiver

log = logging.getLogger(__name__)

SO_PASSRIGHTS = 83
THREADS_PER_UID = 4
"""Number of threads for one uid. A thread is busy for some microseconds, unless it hangs."""
_CREDENTIALS = struct.Struct("3i")
_SENDER_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size)
_MAX_BYTES = 64 << 10
"""Maximum number of bytes that one peek reads of a packet that will be dropped."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ReceivedPacket:
    """A packet that was received from a connection."""

    data: bytes
    flags: int = 0
    """Flags of recvmsg(2)."""
    num_descriptors: int = 0
    fds: tuple[int, ...] = ()
    """The received descriptor, if it is a connection that can be served. The caller owns it."""


class Receiver:
    """A process of `receiver.py`. One thread at a time uses the process."""

    def __init__(self) -> None:
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-S", receiver.__file__]
        standard = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)]
        try:
            self._pid = os.posix_spawn(command[0], command, {}, file_actions=standard, setsid=True)  # no Ctrl-C
        except OSError as error:  # even for EAGAIN: the caller must not retry
            self._door.close()
            raise ConnectionAbortedError(f"no process can be made to receive: {error.strerror}") from error
        finally:
            theirs.close()

    def receive(self, connection: socket.socket, size: int) -> ReceivedPacket:
        """Receive a packet as recvmsg(2) does."""
        socket.send_fds(self._door, [receiver.REQUEST.pack(size)], [connection.fileno()])
        raw, fds, _, _ = socket.recv_fds(self._door, receiver.MAX_DATA_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not raw:
            raise ConnectionAbortedError("the process that receives for it has ended")
        code, flags, num_descriptors = receiver.ANSWER.unpack_from(raw)
        if code:
            raise OSError(code, os.strerror(code))
        return ReceivedPacket(raw[receiver.ANSWER.size :], flags, num_descriptors, tuple(fds))

    def close(self, fd: int) -> bool:
        """Close a connection with its queue. False: the queue had descriptors, so the process ends."""
        socket.send_fds(self._door, [receiver.REQUEST.pack(0)], [fd])
        os.close(fd)
        self._door.send(receiver.GO)
        return bool(self._door.recv(1))

    def let_go(self) -> int:
        """Send no more requests. Return the pid of the process, which closes its descriptors, and ends."""
        self._door.close()
        return self._pid


class Threads:
    """Threads for functions that may hang, THREADS_PER_UID for each uid, and the receivers that the threads use."""

    def __init__(self) -> None:
        self._idle: list[Receiver] = []
        """Idle receivers for all users. A receiver is used again if it has no descriptors to close."""
        self._is_over = False
        self._limiters: dict[int, trio.CapacityLimiter] = {}
        """Limiters of the uids that have a thread, or wait for one."""

    async def run(self, uid: int, call: Callable[[], _T]) -> _T:
        """Return the result of `call`, which runs on a thread. Cancelling the caller does not end the thread."""
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
        """Begin `call` on a thread. The daemon's end does not wait for the thread."""

        async def run() -> None:
            try:
                await self.run(uid, call)
            except Exception:  # without a thread, the descriptors stay open, and the daemon continues
                log.exception("descriptors that uid %d has sent can't be closed", uid)

        trio.lowlevel.spawn_system_task(run)

    def receive(self, connection: socket.socket, size: int) -> tuple[ReceivedPacket, int]:
        """Receive a packet; call this on a thread. Also return the pid of a process with descriptors to close, or 0."""
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
        """Close a connection. Call this on a thread."""
        chosen = self._receiver()
        if chosen.close(fd):
            self._keep(chosen)
        else:
            wait_for(chosen.let_go())

    def end(self) -> None:
        """End the idle receivers when the daemon ends."""
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
    """Wait for the end of a receiver. If it may hang, call this on a thread."""
    os.waitpid(pid, 0)


class PeerSocket:
    """A connection that the daemon has accepted, or that a launcher has passed on."""

    def __init__(
        self, connection: socket.socket | trio.socket.SocketType, threads: Threads, *, is_shared: bool = False
    ) -> None:
        """Take `connection` over. `is_shared`: another process may have a copy, and may use the copy in any way."""
        kind = connection.type
        self.socket = socket.socket(socket.AF_UNIX, kind, fileno=connection.detach())
        self.uid: int = _CREDENTIALS.unpack(
            self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )[1]
        self._threads = threads
        self._is_shared = is_shared
        self._is_risky = is_shared or may_bring_descriptors(self.socket)
        self._lock = threading.Lock()
        """Held by the thread that receives from the connection, or closes it."""
        self._received: tuple[int, ...] = ()
        """Received descriptors that the caller does not have yet. Guarded by the lock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def send(self, data: bytes, ancillary: Iterable[tuple[int, int, array[int]]] = ()) -> None:
        """Send one packet, or a few bytes of a stream in one call."""
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
        """Receive up to `size` bytes, and close the descriptors that come with them."""
        found = await self.receive_descriptors(size)
        self.dispose(found.fds)
        return found.data

    async def receive_descriptors(self, size: int) -> ReceivedPacket:
        """Receive bytes and descriptors. The caller keeps the descriptors, or passes them to `dispose`."""
        while True:
            await self.wait_readable()
            with suppress(BlockingIOError):
                if not self._is_risky:
                    return ReceivedPacket(self.socket.recv(size, socket.MSG_DONTWAIT))
                if not self._is_shared and (num_bytes := self._look(size)) is not None:
                    data, _, flags, _ = self.socket.recvmsg(num_bytes, 0, socket.MSG_DONTWAIT)
                    return ReceivedPacket(data, flags)
                found, closing = await self._threads.run(self.uid, partial(self._receive, size))
                if closing:
                    self._threads.begin(self.uid, partial(wait_for, closing))
                with self._lock:  # the lock is free: only one task receives, and no close is under way
                    self._received = ()
                return found

    def _look(self, size: int) -> int | None:
        """Return the number of bytes that this thread can receive safely. None: descriptors come with the bytes."""
        data, _, flags, _ = self.socket.recvmsg(size, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return None if flags & socket.MSG_CTRUNC else len(data)

    def _receive(self, size: int) -> tuple[ReceivedPacket, int]:
        with self._lock:
            found, closing = self._threads.receive(self.socket, size)
            self._received = found.fds
        return found, closing

    def dispose(self, fds: Iterable[int]) -> None:
        """Close, on threads, connections that were received over this connection."""
        for fd in fds:
            self._threads.begin(self.uid, partial(self._threads.close, fd))

    def close(self) -> None:
        """Close the connection: now, or on a thread if the close may hang."""
        if self.socket.fileno() < 0:
            return
        trio.lowlevel.notify_closing(self.socket)
        if self._lock.acquire(blocking=False):  # otherwise, a receiving thread hangs with the lock
            try:
                if not self._is_risky or self._has_no_descriptors():
                    self.socket.close()
                    return
            finally:
                self._lock.release()
        # The thread gets a bare number: if the daemon ends before a thread is free, no finalizer must close the
        # connection.
        self._threads.begin(self.uid, partial(self._close, self.socket.detach()))

    def _has_no_descriptors(self) -> bool:
        """Shut the connection. Drop its packets up to the first packet with descriptors. Return whether no packet has
        descriptors.
        """
        if self._is_shared or self._received:
            return False
        receiver.shut(self.socket)
        while True:
            try:
                data, sender, flags, _ = self.socket.recvmsg(
                    _MAX_BYTES, _SENDER_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT
                )
            except ConnectionResetError:  # the kernel says once that the peer closed with unread data
                continue
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
    """Make the kernel (since Linux 6.16) refuse descriptors that are sent to connections of `listening`."""
    with suppress(OSError):  # `may_bring_descriptors` checks each connection
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def may_bring_descriptors(connection: socket.socket) -> bool:
    """Return whether the kernel lets descriptors pass on a connection.

    A connection that was made before `refuse_descriptors` may have descriptors in its queue.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) != 0
    except OSError:
        return True


def close_listening(listening: trio.socket.SocketType) -> None:
    """Close a listener on a thread. The close also closes the waiting connections with their queues, and may hang."""
    threading.Thread(target=os.close, args=(listening.detach(),), daemon=True).start()
