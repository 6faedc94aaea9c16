"""Listening sockets that the service manager made and passes to the daemon, as in sd_listen_fds(3)."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from libsym.channel.socket_path import programs_socket
from libsym.errors import Invalid

FIRST_DESCRIPTOR = 3


@dataclass(frozen=True, slots=True)
class Activated:
    """The daemon's two sockets, made by the service manager. The service manager also removes their files."""

    path: Path
    calls: socket.socket
    launchers: socket.socket


def activated(environment: MutableMapping[str, str] = os.environ) -> Activated | None:
    """Return the sockets that the service manager passed to this process. None: no sockets were passed.
    Invalid: the sockets are not the two that the daemon needs.
    """
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "0")
    environment.pop("LISTEN_FDNAMES", "")
    if pid != str(os.getpid()) or count == "0":
        return None
    if not count.isdecimal():
        raise Invalid(f"LISTEN_FDS is {count!r}: the number of sockets that are handed over is needed")
    found = dict[socket.SocketKind, list[socket.socket]]()
    for number in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)):
        each = _listening(number)
        found.setdefault(each.type, []).append(each)
    calls, launchers = found.get(socket.SOCK_STREAM, []), found.get(socket.SOCK_SEQPACKET, [])
    if len(calls) != 1 or len(launchers) != 1 or len(found) != 2:
        raise Invalid(
            f"{count} sockets are handed over: one ListenStream= and one ListenSequentialPacket= are needed, "
            "as symphony.socket has them"
        )
    path, other = Path(os.fsdecode(calls[0].getsockname())), os.fsdecode(launchers[0].getsockname())
    if other != str(programs_socket(path)):
        raise Invalid(f"the socket of launchers is at {other}: it has to be at {programs_socket(path)}")
    return Activated(path, calls[0], launchers[0])


def _listening(number: int) -> socket.socket:
    try:
        os.set_inheritable(number, False)
        found = socket.socket(fileno=number)
        is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise Invalid(f"descriptor {number} is handed over, and is no socket: {error.strerror}") from None
    if found.family != socket.AF_UNIX or not is_listening:
        raise Invalid(f"descriptor {number} is handed over, and is no Unix socket that listens")
    found.setblocking(False)
    return found
