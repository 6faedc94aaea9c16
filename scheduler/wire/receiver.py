"""Receiver: a process that receives packets with descriptors for the daemon.

    python -I -S receiver.py        with a SOCK_SEQPACKET as standard input

The last close of a file waits for its file system. A FUSE server that hangs blocks the process that closes, even its
exit after SIGKILL. So the daemon leaves the close of unneeded descriptors to this process, which may hang.

A request is a size, with a connection as its descriptor. The answer is the result of recvmsg(2): its errno, its flags,
the number of descriptors, then the bytes. A connection that can be served is passed on with the answer. Any other
descriptors make this process exit after the answer; an exit does not wait for SO_LINGER. A request of size 0 asks this
process to empty and close a connection, as soon as a packet says that the daemon has closed its own copy.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from contextlib import suppress
from typing import NoReturn

REQUEST, ANSWER = struct.Struct("i"), struct.Struct("3i")
GO, EMPTIED = b"+", b"-"
MAX_DATA_BYTES = 128 << 10
_CREDENTIALS_BYTES = 12
_MAX_DESCRIPTORS = 253
"""Maximum number of descriptors of one packet: the kernel's SCM_MAX_FD."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS_BYTES) + socket.CMSG_SPACE(_MAX_DESCRIPTORS * array("i").itemsize)
_RECEIVE = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_THROWN_BYTES = 64 << 10
_HIGHEST = (1 << 31) - 1

Ancillary = list[tuple[int, int, bytes]]


def serve(door: socket.socket) -> None:
    """Serve requests until the daemon closes its end."""
    while True:
        raw, fds, _, _ = socket.recv_fds(door, REQUEST.size, 1, socket.MSG_CMSG_CLOEXEC)
        if not raw:
            return
        (size,) = REQUEST.unpack(raw)
        with socket.socket(fileno=fds[0]) as connection:
            if size:
                _receive(door, connection, size)
                continue
            door.recv(1)
            _throw_away(connection)
        door.send(EMPTIED)


def _receive(door: socket.socket, connection: socket.socket, size: int) -> None:
    try:
        data, ancillary, flags, _ = connection.recvmsg(size, _ANCILLARY_BYTES, _RECEIVE)
    except OSError as error:
        door.send(ANSWER.pack(error.errno, 0, 0))
        return
    fds = _descriptors(ancillary)
    answer = ANSWER.pack(0, flags, len(fds)) + data
    if not fds:
        door.send(answer)
    elif len(fds) == 1 and _can_be_served(fds[0]):
        socket.send_fds(door, [answer], fds)
        os.close(fds[0])
    else:
        door.send(answer)
        _end()


def _can_be_served(fd: int) -> bool:
    """Return whether a descriptor is a connection of the kind that the daemon's listener accepts."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:  # not a socket
        return False
    try:
        if connection.family != socket.AF_UNIX or connection.type != socket.SOCK_STREAM:
            return False
        connection.getpeername()
        return not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        return False
    finally:
        connection.detach()


def _throw_away(connection: socket.socket) -> None:
    try:
        shut(connection)
        while True:
            data, ancillary, _, _ = connection.recvmsg(_THROWN_BYTES, _ANCILLARY_BYTES, _RECEIVE)
            if _descriptors(ancillary):
                _end()
            if is_end(connection, data, ancillary):
                return
    except OSError:  # another process has changed the connection through a copy
        _end()


def shut(connection: socket.socket) -> None:
    """Shut a connection for new packets. From now on, packets from its queue are received with their sender."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with suppress(OSError):  # it is no longer connected
        connection.shutdown(socket.SHUT_RD)


def is_end(connection: socket.socket, data: bytes, ancillary: Ancillary) -> bool:
    """Return whether the queue of a shut connection is empty. (Even an empty packet is received with its sender.)"""
    return not data and not (connection.type == socket.SOCK_SEQPACKET and ancillary)


def _descriptors(ancillary: Ancillary) -> list[int]:
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _end() -> NoReturn:
    """Exit, which closes all descriptors. If this process closed each descriptor, each close would linger."""
    os._exit(0)


if __name__ == "__main__":
    os.closerange(3, _HIGHEST)
    with suppress(ConnectionResetError, BrokenPipeError):  # the daemon was killed in the middle of a request
        serve(socket.socket(fileno=0))
