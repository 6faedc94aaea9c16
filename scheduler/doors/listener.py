"""Listener on the daemon's socket. The kernel identifies each peer. A connection has a shared region and a doorbell.

No user can lock other users out. A user may have only a part of the connections, and of the handshakes in flight. A
handshake has a timeout. All connections together leave a part of the daemon's descriptors to the mount and its plain
files.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
from array import array
from contextlib import ExitStack
from pathlib import Path

import trio

from kvfs.names.tree import Credentials
from libsym.channel.handshake import GREETING_BYTES, check_greeting, refusal, welcome
from libsym.channel.server import ServerChannel
from libsym.errors import Exists, ProtocolError, SymError, WouldBlock
from scheduler.connection.lip import Lip
from scheduler.connection.places import Places
from scheduler.connection.under_way import num_calls_in
from scheduler.doors.gate import Gate
from scheduler.programs.program import Program
from scheduler.wire.peer_socket import PeerSocket, Threads, refuse_descriptors
from scheduler.wire.peers import NO_ROOM, accept_for_ever, peer_credentials, peer_pidfd

log = logging.getLogger(__name__)

MAX_LIPS = 1024
MAX_HANDSHAKES = 256
"""Maximum number of handshakes in flight. Clients greet without delay, so a handshake takes some microseconds."""
GREETING_TIMEOUT_S = 5.0
BACKLOG = 1024
"""Maximum number of connections that wait to be accepted: `MAX_LIPS`, if net.core.somaxconn allows as many."""
KEPT_PART = 4
"""Reserve one in `KEPT_PART` descriptors for the mount and its plain files."""
WARNING_PAUSE_S = 1.0
"""Least pause between two log lines about refused connections. A refused client may try again at once."""
_CALLS_AT_ONCE = 64
"""Maximum number of calls of one LIP that are handled before calls of other LIPs. Each call of a batch counts."""
_AT_ONCE_S = 0.01
"""Time after which calls of other LIPs are handled. Some calls take a hundred times as long as others."""
_FULL_S = 0.005
"""Pause before the next look at a LIP that has more calls in flight than libsym would send."""


class Listener:
    """Accepts connections, and serves each until one side ends it."""

    def __init__(
        self, gate: Gate, vocab_size: int, exempt: frozenset[int] = frozenset(), threads: Threads | None = None
    ) -> None:
        """Take the gate, and the size of the vocabulary for the shared regions.

        `exempt` users may take the last places. `threads` receive from connections that may bring descriptors.
        """
        self._gate = gate
        self._vocab_size = vocab_size
        self._threads = threads or Threads()
        self.lips: set[Lip] = set()
        self._handshakes = Places(MAX_HANDSHAKES, "handshakes", exempt)
        self._connections = Places(MAX_LIPS, "connections", exempt)
        self._warned_s = -WARNING_PAUSE_S
        self._num_refused = 0
        """Number of refused connections since the last log line about them."""
        self._nursery: trio.Nursery | None = None

    async def close(self) -> None:
        """End the threads and close the gate, after `run`: see `Gate.close`."""
        self._threads.end()
        await self._gate.close()

    async def run(self, listening: trio.socket.SocketType) -> None:
        """Accept connections for ever. The end of this call closes every connection."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await accept_for_ever(
                listening,
                "connection",
                lambda connection: nursery.start_soon(self._serve, PeerSocket(connection, self._threads)),
            )

    def adopt(self, connection: socket.socket, program: Program) -> None:
        """Serve a connection that a launcher has accepted for one of its programs.

        The launcher may keep a copy of the connection, change the connection's flags, and read packets from its queue.
        """
        assert self._nursery is not None
        self._nursery.start_soon(self._serve, PeerSocket(connection, self._threads, is_shared=True), program)

    async def _serve(self, connection: PeerSocket, program: Program | None = None) -> None:
        """Serve one connection, from the handshake to its end. Its failures do not affect other connections."""
        lip = None
        with connection, ExitStack() as place:
            try:
                lip = await self._let_in(connection, place)
                if lip is not None:
                    lip.launched = program
                    await self._serve_lip(connection, lip)
            except* (ConnectionError, ProtocolError) as errors:
                _drop(_first(errors), lip)
            except* Exception:
                log.exception("connection dropped", extra=_subject(lip))

    async def _serve_lip(self, connection: PeerSocket, lip: Lip) -> None:
        self.lips.add(lip)
        self._gate.welcome(lip)
        log.debug("program %d connected (uid %d)", lip.pid, lip.credentials.uid, extra=lip.subject)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_wait_for_hangup, connection, nursery.cancel_scope)
                nursery.start_soon(_wait_for_end, connection, lip.pid, nursery.cancel_scope)
                try:
                    await self._take_calls(lip, nursery)
                except (ConnectionError, ProtocolError) as error:
                    _drop(error, lip)
                    nursery.cancel_scope.cancel()
        finally:
            try:
                await self._gate.see_off(lip)
            finally:
                self.lips.remove(lip)
            log.debug("program %d gone", lip.pid, extra=lip.subject)

    async def _let_in(self, connection: PeerSocket, place: ExitStack) -> Lip | None:
        """Do the handshake, and take a place among the connections. None: the peer was refused, or hung up."""
        subject: dict[str, object] = {}
        try:
            try:
                pid, credentials = peer_credentials(connection.socket)
                subject = {"program": pid, "user": credentials.uid}
                keep_descriptors(connection.socket.fileno())
                with self._handshakes.one_for(credentials.uid):
                    version = check_greeting(await _greeting(connection))
                    place.enter_context(self._connections.one_for(credentials.uid))
                    return await self._welcome(connection, pid, credentials, version)
            except SymError as error:
                self._warn(error, subject)
                with trio.move_on_after(GREETING_TIMEOUT_S):  # a launcher may have filled the send buffer
                    await connection.send(refusal(error))
        except ConnectionError as error:
            log.debug("hung up during the handshake: %s", error)
        return None

    async def _welcome(self, connection: PeerSocket, pid: int, credentials: Credentials, version: int) -> Lip:
        channel = self._new_channel(version)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", channel.fds))
        try:
            await connection.send(welcome(version), [rights])
        except BaseException:
            channel.close()
            raise
        channel.forget_fds()
        return Lip(pid, credentials, channel)

    def _new_channel(self, version: int) -> ServerChannel:
        try:
            channel = ServerChannel.create(self._vocab_size, version=version)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise WouldBlock(f"the daemon can take no more programs now: {error.strerror}") from error
        try:
            keep_descriptors(*channel.fds)
        except WouldBlock:
            channel.close()
            raise
        return channel

    def _warn(self, error: SymError, subject: dict[str, object]) -> None:
        self._num_refused += 1
        if trio.current_time() >= self._warned_s + WARNING_PAUSE_S:
            text = "connection refused: %s (%d since the last such line)"
            log.warning(text, error, self._num_refused, extra=subject)
            self._warned_s, self._num_refused = trio.current_time(), 0

    async def _take_calls(self, lip: Lip, nursery: trio.Nursery) -> None:
        channel = lip.channel
        while True:
            lip.slots.serve()
            requests = self._gate.receive(lip, _CALLS_AT_ONCE)
            num_calls, until_s = 0, trio.current_time() + _AT_ONCE_S
            for request in requests:
                if num_calls >= _CALLS_AT_ONCE or trio.current_time() > until_s:
                    await trio.lowlevel.checkpoint()
                    num_calls, until_s = 0, trio.current_time() + _AT_ONCE_S
                self._gate.handle(lip, request, nursery)
                num_calls += num_calls_in(request)
            if requests:
                await trio.lowlevel.checkpoint()
            elif channel.is_full:
                await trio.sleep(_FULL_S)
            elif channel.arm():
                with trio.move_on_at(lip.slots.deadline) as lip.nap:
                    await trio.lowlevel.wait_readable(channel.doorbell)
                channel.clear_doorbell()
            else:
                await trio.lowlevel.checkpoint()


async def _greeting(connection: PeerSocket) -> bytes:
    """Return the client's greeting. SymError: the greeting does not arrive in time."""
    greeting = b""
    with trio.move_on_after(GREETING_TIMEOUT_S):
        while len(greeting) < GREETING_BYTES:
            data = await connection.receive(GREETING_BYTES - len(greeting))
            if not data:
                raise ConnectionResetError("it had not greeted yet")
            greeting += data
        return greeting
    raise SymError(
        f"{len(greeting)} of a greeting's {GREETING_BYTES} bytes came in {GREETING_TIMEOUT_S:g} s: connect again",
        errno.ETIMEDOUT,
    )


def keep_descriptors(*fds: int) -> None:
    """Check new descriptors of a connection. WouldBlock: only reserved descriptors are left.

    The kernel gives out the lowest free number. So all lower numbers are open descriptors.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max(fds) >= limit - limit // KEPT_PART:
        raise WouldBlock(
            f"the daemon has {max(fds)} of its {limit} descriptors open, and keeps the rest for the mount: try again "
            "later, or start it with a higher ulimit -n"
        )


async def _wait_for_hangup(connection: PeerSocket, scope: trio.CancelScope) -> None:
    """Cancel `scope` when the socket is readable: the program has ended, or breaks the protocol by sending more."""
    await connection.wait_readable()
    scope.cancel()


async def _wait_for_end(connection: PeerSocket, pid: int, scope: trio.CancelScope) -> None:
    """Cancel `scope` when the process ends: a child that inherited the socket may keep the connection open."""
    try:
        pidfd = peer_pidfd(connection.socket, pid)
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


def _subject(lip: Lip | None) -> dict[str, object] | None:
    return None if lip is None else lip.subject


def _drop(error: BaseException, lip: Lip | None) -> None:
    """Log why a connection ends. Raising the error would make a reference cycle that keeps the connection's tasks
    alive.
    """
    log.warning("connection dropped: %s", str(error), extra=_subject(lip))


def _first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def clear_way(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM, key: str = "--socket") -> None:
    """Remove the socket of a dead daemon. SymError: a daemon listens there. Exists: the path is not a socket.

    `key`: the option or key that gave the path.
    """
    if os.path.lexists(path) and not path.is_socket():
        raise Exists(f"{path} is there and is no socket: choose another {key}")
    if _listens(path, kind):
        raise SymError(f"a daemon already listens on {path}: stop it, or choose another {key}", errno.EADDRINUSE)
    path.unlink(missing_ok=True)


def bind(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Return a listening socket at `path`. SymError: another daemon listens there."""
    clear_way(path, kind)
    listening = socket.socket(socket.AF_UNIX, kind)
    listening.bind(str(path))
    if kind == socket.SOCK_STREAM:  # launchers send descriptors
        refuse_descriptors(listening)
    path.chmod(0o666)  # every user that reaches the socket may use it; each KV file has its own permissions
    listening.listen(BACKLOG)
    return listening


def _listens(path: Path, kind: socket.SocketKind) -> bool:
    """Return whether a live process listens on the socket, even a stopped process or one with a full queue."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True
    return True
