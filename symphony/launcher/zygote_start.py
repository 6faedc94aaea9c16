"""How a launcher starts a zygote; it needs little, so that it can be done first."""

from __future__ import annotations

import os
import socket
import sys
from typing import NamedTuple

from symphony.launcher.processes import ZYGOTE_OF
from symphony.launcher.surroundings import surroundings


class Started(NamedTuple):
    """A zygote, which listens when it has loaded libsym."""

    pid: int
    connection: socket.socket


def start_zygote(directory: str) -> Started:
    """`directory`: the launcher's, which marks the zygote and what is forked from it."""
    connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"from symphony.launcher.zygote import main; main({theirs.fileno()})"
    theirs.set_inheritable(True)
    with theirs:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-u", "-c", code],
            {**surroundings(), ZYGOTE_OF: directory},
            setsigdef=range(1, 32),
        )
    return Started(pid, connection)
