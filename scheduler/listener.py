"""The daemon's socket: who connects is told by the kernel, and gets one shared region and one doorbell."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from array import array
from pathlib import Path

import trio

from kvfs.tree import Credentials
from libsym.channel import ServerChannel
from libsym.errors import Exists, ProtocolError, SymError
from libsym.handshake import GREETING_BYTES, WELCOME, check_greeting, refusal
from scheduler.gate import Gate
from scheduler.lip import Lip

log = logging.getLogger(__name__)

MAX_LIPS = 1024
GREETING_TIMEOUT_S = 5.0
ACCEPT_AGAIN_S = 0.1
"""Without descriptors or memory for one more connection: so long until the next try."""
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_CALLS_AT_ONCE = 64
"""A LIP that floods its ring lets the others in after this many."""
_FULL_S = 0.005
"""A LIP that has more under way than its library would is looked after this often, until some of it is answered."""
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_MAX_GROUPS = 256
"""Supplementary groups of a peer: Python's getsockopt takes a buffer of 1,024 bytes at most."""


class Listener:
    """Accepts connections and serves each until either side goes."""

    def __init__(self, gate: Gate, vocab_size: int) -> None:
        self._gate = gate
        self._vocab_size = vocab_size
        self.lips: set[Lip] = set()

    async def run(self, listening: trio.socket.SocketType) -> None:
        """Accept for ever; leaving closes every connection."""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    connection, _ = await listening.accept()
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise
                    log.warning("no connection can be accepted: %s", error.strerror)
                    await trio.sleep(ACCEPT_AGAIN_S)
                else:
                    nursery.start_soon(self._serve, connection)

    async def _serve(self, connection: trio.socket.SocketType) -> None:
        """One connection, from the handshake to the end; nothing that happens to it reaches the others."""
        with connection:
            try:
                lip = await self._greet(connection)
                if lip is not None:
                    await self._serve_lip(connection, lip)
            except* (ConnectionError, ProtocolError) as errors:
                log.warning("connection dropped: %s", _first(errors))
            except* Exception:
                log.exception("connection dropped")

    async def _serve_lip(self, connection: trio.socket.SocketType, lip: Lip) -> None:
        self.lips.add(lip)
        lip.channel.made_room = lip.made_room
        self._gate.welcome(lip)
        log.debug("program %d connected (uid %d)", lip.pid, lip.credentials.uid)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_wait_for_hangup, connection, nursery.cancel_scope)
                nursery.start_soon(_wait_for_end, connection, lip.pid, nursery.cancel_scope)
                await self._take_calls(lip, nursery)
        finally:
            try:
                await self._gate.see_off(lip)
            finally:
                self.lips.remove(lip)
            log.debug("program %d gone", lip.pid)

    async def _greet(self, connection: trio.socket.SocketType) -> Lip | None:
        """The handshake; None when the other side is no client of this version, or there are too many."""
        greeting = b""
        with trio.move_on_after(GREETING_TIMEOUT_S):
            while len(greeting) < GREETING_BYTES:
                data = await connection.recv(GREETING_BYTES - len(greeting))
                if not data:
                    return None
                greeting += data
        try:
            check_greeting(greeting)
            peer = peer_credentials(connection)
            channel = self._new_channel()
        except SymError as error:
            log.warning("connection refused: %s", error)
            await connection.send(refusal(error))
            return None
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", channel.fds))
        try:
            await connection.sendmsg([WELCOME], [rights])
        except BaseException:
            channel.close()
            raise
        channel.forget_fds()
        return Lip(*peer, channel)

    def _new_channel(self) -> ServerChannel:
        if len(self.lips) >= MAX_LIPS:
            raise SymError(f"the daemon serves {MAX_LIPS} programs already: try again later", errno.EAGAIN)
        try:
            return ServerChannel.create(self._vocab_size)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise SymError(f"the daemon can take no more programs now: {error.strerror}", errno.EAGAIN) from error

    async def _take_calls(self, lip: Lip, nursery: trio.Nursery) -> None:
        channel = lip.channel
        while True:
            lip.slots.serve()
            requests = channel.receive(_CALLS_AT_ONCE)
            for request in requests:
                self._gate.handle(lip, request, nursery)
            if requests:
                await trio.lowlevel.checkpoint()
            elif channel.is_full:
                await trio.sleep(_FULL_S)
            elif channel.arm():
                with trio.move_on_at(lip.slots.deadline) as lip.nap:
                    await trio.lowlevel.wait_readable(channel.doorbell)
                channel.clear_doorbell()


async def _wait_for_hangup(connection: trio.socket.SocketType, scope: trio.CancelScope) -> None:
    """Nothing more is ever sent on the socket: when it is readable, the program has gone (or breaks the protocol)."""
    try:
        await connection.recv(1)
    except ConnectionError:
        log.debug("connection reset")
    scope.cancel()


async def _wait_for_end(connection: trio.socket.SocketType, pid: int, scope: trio.CancelScope) -> None:
    """The process itself: a child of its may have inherited the socket, and keep it open without being the program."""
    try:
        pidfd = peer_pidfd(connection, pid)
    except ProcessLookupError:
        scope.cancel()
        return
    if pidfd is None:
        return
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
    scope.cancel()


def _first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def peer_credentials(connection: trio.socket.SocketType) -> tuple[int, Credentials]:
    """The pid and the identity of the process at the other end, as it was when it connected."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", peer)
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError as error:
        raise SymError(f"the groups of process {pid} can't be read: {error.strerror}", error.errno) from error
    groups = struct.unpack(f"{len(raw) // 4}I", raw)
    return pid, Credentials(uid, gid, frozenset(groups))


def peer_pidfd(connection: trio.socket.SocketType, pid: int) -> int | None:
    """A descriptor of the process that connected, readable when it has ended. None: this kernel tells nothing of it.

    ProcessLookupError: it has ended.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except ProcessLookupError:
        raise
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # before Linux 6.5 by its number, which might be another's by now
            log.debug("no pidfd of the peer %d: %s", pid, error.strerror)
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:  # not of our namespace, or a kernel before 5.3: the socket's hang-up has to do
        log.debug("no pidfd of process %d: %s", pid, error.strerror)
        return None


def bind(path: Path) -> socket.socket:
    """A listening socket at `path`; a leftover of a dead daemon is replaced, a live one refused."""
    if os.path.lexists(path) and not path.is_socket():
        raise Exists(f"{path} is there and is no socket: choose another --socket")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            pass
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise SymError(f"a daemon already listens on {path}: stop it, or choose another --socket", errno.EADDRINUSE)
    listening.bind(str(path))
    path.chmod(0o666)  # permission is per file: whoever may reach the socket may own KV files
    listening.listen(128)
    return listening
