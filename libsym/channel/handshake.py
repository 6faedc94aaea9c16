"""The handshake of a LIP and the daemon: one message each way on a Unix socket.

Client: {magic, newest and oldest ABI version that the client speaks}. Daemon: {magic, ABI version that both speak,
errno, text length, text}. With errno 0, the daemon's message brings three descriptors: the region's memfd, the doorbell
and the bell. The kernel tells the daemon the identity of the client, which no message could prove. A daemon is upgraded
before its programs. So the daemon speaks all versions from that of the previous release (ABI_OLDEST) on. libsym speaks
only its own version.

The socket stays open and silent. When it closes, each side knows that the other has ended.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress

from libsym.abi import ABI_OLDEST, ABI_VERSION, GREETING_STRUCT, MAGIC, WELCOME_STRUCT
from libsym.errors import Invalid, NoAccess, NotConnected, ProtocolError, SymError, error_for

GREETING_BYTES = GREETING_STRUCT.size
GREETING = GREETING_STRUCT.pack(MAGIC, ABI_VERSION, ABI_VERSION, 0)
"""The first message of a client."""

_NUM_FDS = 3
_MAX_TEXT_BYTES = 4096
_ANSWER_TIMEOUT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Pauses between tries to connect while the daemon's listen queue is full."""


def check_greeting(raw: bytes) -> int:
    """Return the newest version that both the client and the daemon speak. ProtocolError: no common version exists."""
    if len(raw) != GREETING_BYTES:
        raise ProtocolError(f"the client's greeting has {len(raw)} bytes instead of {GREETING_BYTES}")
    magic, newest, oldest, _ = GREETING_STRUCT.unpack(raw)
    _check_magic(magic, "client")
    version: int = min(newest, ABI_VERSION)
    if version < max(oldest or newest, ABI_OLDEST):
        raise ProtocolError(
            f"the client speaks ABI version {newest}, this daemon {ABI_OLDEST} to {ABI_VERSION}: use one release"
        )
    return version


def welcome(version: int = ABI_VERSION) -> bytes:
    """Return the daemon's answer to a client that it accepts. Both sides speak `version` from now on."""
    return WELCOME_STRUCT.pack(MAGIC, version, 0, 0)


def refusal(error: SymError) -> bytes:
    """Return the daemon's answer to a client that it refuses.

    An older client reads the reason only if the answer has a version that it speaks. A client without a common version
    has to see the daemon's own version.
    """
    version = ABI_VERSION if isinstance(error, ProtocolError) else ABI_OLDEST
    text = str(error).encode()[:_MAX_TEXT_BYTES]
    return WELCOME_STRUCT.pack(MAGIC, version, error.errno or errno.EIO, len(text)) + text


def dial(path: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> tuple[socket.socket, int, int, int]:
    """Connect to the daemon at `path`; return the socket, the region's memfd, the doorbell and the bell."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        connection.settimeout(timeout_s)
        _connect(connection, path, time.monotonic() + timeout_s)
        with suppress(ConnectionError):  # the daemon may have hung up after a refusal, which is read below
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
    """Connect as soon as the daemon's listen queue has space."""
    pause_s = _FIRST_PAUSE_S
    while not _is_queued(connection, path):
        if time.monotonic() + pause_s > deadline_s:
            raise TimeoutError
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _is_queued(connection: socket.socket, path: str) -> bool:
    """Try once to connect. False: the daemon's listen queue is full."""
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
        raise NotConnected(f"the process at {path} hung up instead of answering: see the daemon's log")
    magic, version, code, text_bytes = WELCOME_STRUCT.unpack_from(raw)
    _check_magic(magic, f"daemon at {path}")
    if version != ABI_VERSION and code in (0, errno.EPROTO):
        raise ProtocolError(_other_release(version, path))
    if code != 0:
        raise error_for(code, raw[WELCOME_STRUCT.size : WELCOME_STRUCT.size + text_bytes].decode(errors="replace"))
    if num_fds != _NUM_FDS:
        raise ProtocolError(f"the daemon at {path} sent {num_fds} descriptors instead of {_NUM_FDS}")


def _check_magic(magic: int, who: str) -> None:
    if magic != MAGIC:
        raise ProtocolError(f"the {who} does not speak Symphony's protocol (it began with {magic:#010x})")


def _other_release(version: int, path: str) -> str:
    """Return the error message for a libsym that is newer than the daemon, or too old for it."""
    older, what_to_do = "newer", "install the libsym of the daemon's release here"
    if version < ABI_VERSION:
        older, what_to_do = "older", "upgrade the daemon, or install the libsym of its release here"
    return (
        f"the daemon at {path} is {older} than this program's libsym (ABI version {version}, here {ABI_VERSION}): "
        f"{what_to_do}"
    )
