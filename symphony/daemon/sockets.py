"""The daemon's listening sockets: the daemon makes and removes them, unless the service manager passes them on."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trio

from libsym.channel.socket_path import make_socket_directory, programs_socket
from libsym.errors import Invalid, SymError
from scheduler.doors.listener import bind, clear_way
from scheduler.wire.peer_socket import close_listening, refuse_descriptors
from symphony.service.activation import Activated

Listening = tuple[trio.socket.SocketType, trio.socket.SocketType]
"""Listening sockets for programs and for launchers."""


class Sockets:
    """Both listening sockets of one daemon: for programs and for launchers."""

    def __init__(self, path: Path, activated: Activated | None) -> None:
        """Check, before the daemon loads a model in vain, that the sockets can be made. SymError: the check fails."""
        self._path = path
        self._activated = activated
        if activated is None:
            _prepare(path)
        elif activated.path != path:
            raise Invalid(
                f"socket is {path}, and the service manager listens at {activated.path}: leave the key out, or change "
                "ListenStream= of the socket's unit"
            )

    @contextmanager
    def listening(self) -> Iterator[Listening]:
        """Listen until the context ends."""
        with ExitStack() as stack:
            if self._activated is not None:
                refuse_descriptors(self._activated.calls)
                handed = (self._activated.calls, self._activated.launchers)
                calls, launchers = (stack.enter_context(_closed_on_thread(each)) for each in handed)
            else:
                launchers = stack.enter_context(_bound(programs_socket(self._path), socket.SOCK_SEQPACKET))
                calls = stack.enter_context(_bound(self._path))
            yield calls, launchers


def _prepare(path: Path) -> None:
    with _may_listen(path):
        make_socket_directory(path)
        clear_way(path)
        clear_way(programs_socket(path), socket.SOCK_SEQPACKET)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _may_listen(path: Path) -> Iterator[None]:
    try:
        yield
    except SymError:
        raise
    except OSError as error:  # for a path that is too long, Python raises OSError without an errno
        why = error.strerror or str(error)
        raise SymError(f"can't listen on {path}: {why}; choose another --socket", error.errno) from None


@contextmanager
def _bound(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> Iterator[trio.socket.SocketType]:
    with _may_listen(path):
        listening: socket.socket = bind(path, kind)
    identity = path.stat().st_ino
    try:
        with _closed_on_thread(listening) as wrapped:
            yield wrapped
    finally:
        if path.exists() and path.stat().st_ino == identity:
            path.unlink()


@contextmanager
def _closed_on_thread(listening: socket.socket) -> Iterator[trio.socket.SocketType]:
    wrapped = trio.socket.from_stdlib_socket(listening)
    try:
        yield wrapped
    finally:
        close_listening(wrapped)
