"""Messages between a launcher and its clients, over SOCK_SEQPACKET, which keeps messages whole.

The first byte is the kind of the message. `J`: JSON. `M`: long JSON, in a memfd that is sent along. `O`, `E`, `I`:
bytes of standard output, error or input. `I` without bytes is the end of input.
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any

JSON, LONG_JSON, OUTPUT, ERROR, INPUT = b"J", b"M", b"O", b"E", b"I"
CHUNK_BYTES = 32 << 10
"""Maximum number of bytes of a stream in one message. A socket's buffer holds several such messages."""
_LONG_BYTES = 16 << 10
_MAX_BYTES = CHUNK_BYTES + 64
_MAX_JSON_BYTES = 32 << 20

Message = dict[str, Any]


def send(connection: socket.socket, message: Message) -> None:
    """Send a JSON message. BlockingIOError: the socket's buffer is full, and nothing was sent."""
    raw = json.dumps(message).encode()
    if len(raw) <= _LONG_BYTES:
        connection.send(JSON + raw)
        return
    with os.fdopen(os.memfd_create("symphony-message", os.MFD_CLOEXEC), "wb") as file:
        file.write(raw)
        file.flush()
        rights = array.array("i", [file.fileno()])
        connection.sendmsg([LONG_JSON], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive(connection: socket.socket) -> tuple[bytes, Any]:
    """Receive a message, and return its kind and content: the bytes of a stream, or decoded JSON.
    The kind is b"" if the peer has closed the connection.
    """
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    try:
        raw, ancillary, _, _ = connection.recvmsg(_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the peer ended with unread data; after this one error, its messages can be read
        raw, ancillary, _, _ = connection.recvmsg(_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    kind, content = raw[:1], raw[1:]
    try:
        if kind == LONG_JSON and fds:
            return JSON, json.loads(_whole(fds[0]))
        return kind, json.loads(content) if kind == JSON else content
    finally:
        for fd in fds:
            os.close(fd)


def _whole(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    if size > _MAX_JSON_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return os.pread(fd, size, 0)
