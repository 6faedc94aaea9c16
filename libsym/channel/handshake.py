"""How a LIP and the daemon meet: one message each way on a Unix socket, and the region comes with the answer.

Client: {magic, ABI version, 0}. Daemon: {magic, ABI version, errno, text length, text}, and with errno 0 three
descriptors, the region's memfd, the doorbell and the bell. Who the client is the kernel tells the daemon; no message
could.
The socket stays open and silent: its closing is how each side sees the other end.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress

from libsym.abi import ABI_VERSION, GREETING_STRUCT, MAGIC, WELCOME_STRUCT
from libsym.errors import Invalid, NoAccess, NotConnected, ProtocolError, SymError, error_for

GREETING_BYTES = GREETING_STRUCT.size
GREETING = GREETING_STRUCT.pack(MAGIC, ABI_VERSION, 0)
"""What a client sends first."""

WELCOME = WELCOME_STRUCT.pack(MAGIC, ABI_VERSION, 0, 0)
"""The daemon's answer to a client that it lets in."""

_NUM_FDS = 3
_MAX_TEXT_BYTES = 4096
_ANSWER_TIMEOUT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Between tries to get into the queue of a daemon that has not yet accepted those who came before."""


def check_greeting(raw: bytes) -> None:
    """Raises ProtocolError unless `raw` is the greeting of a client that speaks this version."""
    if len(raw) != GREETING_BYTES:
        raise ProtocolError(f"the client's greeting has {len(raw)} bytes instead of {GREETING_BYTES}")
    magic, version, _ = GREETING_STRUCT.unpack(raw)
    _check_version(magic, version, "client")


def refusal(error: SymError) -> bytes:
    """The daemon's answer to a greeting when it does not let the client in."""
    text = str(error).encode()[:_MAX_TEXT_BYTES]
    return WELCOME_STRUCT.pack(MAGIC, ABI_VERSION, error.errno or errno.EIO, len(text)) + text


def dial(path: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> tuple[socket.socket, int, int, int]:
    """Connects to the daemon at `path`: the socket, the region's memfd, the doorbell, the bell."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        connection.settimeout(timeout_s)
        _connect(connection, path, time.monotonic() + timeout_s)
        with suppress(ConnectionError):  # it may have hung up already, and said why
            connection.sendall(GREETING)
        size = WELCOME_STRUCT.size + _MAX_TEXT_BYTES
        raw, fds, _, _ = socket.recv_fds(connection, size, _NUM_FDS, socket.MSG_CMSG_CLOEXEC)
        _check_welcome(raw, len(fds), path)
        return connection, fds[0], fds[1], fds[2]
    except BaseException as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError):
            raise NotConnected(f"the daemon at {path} does not answer: is it stopped or overloaded?") from error
        if isinstance(error, ConnectionError):
            raise NotConnected(f"the daemon at {path} hung up during the handshake: see its log") from error
        raise


def _connect(connection: socket.socket, path: str, deadline_s: float) -> None:
    """Gets into the queue of the daemon, as soon as there is room."""
    pause_s = _FIRST_PAUSE_S
    while not _is_queued(connection, path):
        if time.monotonic() + pause_s > deadline_s:
            raise TimeoutError
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _is_queued(connection: socket.socket, path: str) -> bool:
    """One try to connect. False: the daemon's queue is full."""
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NotConnected(
            f"no daemon listens at {path}: start it with `symphony serve`, or set SYMPHONY_SOCKET to its socket"
        ) from error
    except PermissionError as error:
        raise NoAccess(f"the socket {path} may not be opened by this user: ask who runs the daemon") from error
    except BlockingIOError:
        return False
    except (ConnectionError, TimeoutError):
        raise
    except (OSError, ValueError) as error:
        raise Invalid(f"{path} cannot be a daemon's socket ({error}): set SYMPHONY_SOCKET to its socket") from error
    return True


def _check_welcome(raw: bytes, num_fds: int, path: str) -> None:
    if len(raw) < WELCOME_STRUCT.size:
        raise NotConnected(f"whoever listens at {path} hung up instead of answering: see the daemon's log")
    magic, version, code, text_bytes = WELCOME_STRUCT.unpack_from(raw)
    _check_version(magic, version, f"daemon at {path}")
    if code != 0:
        raise error_for(code, raw[WELCOME_STRUCT.size : WELCOME_STRUCT.size + text_bytes].decode(errors="replace"))
    if num_fds != _NUM_FDS:
        raise ProtocolError(f"the daemon at {path} sent {num_fds} descriptors instead of {_NUM_FDS}")


def _check_version(magic: int, version: int, who: str) -> None:
    if magic != MAGIC:
        raise ProtocolError(f"the {who} does not speak Symphony's protocol (it began with {magic:#010x})")
    if version != ABI_VERSION:
        raise ProtocolError(
            f"the {who} speaks ABI version {version}, this side {ABI_VERSION}: use one release for both"
        )
