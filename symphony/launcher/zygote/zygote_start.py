"""Start of a zygote by its launcher. This module imports little, so that the zygote can start early."""

from __future__ import annotations

import os
import socket
import sys
from typing import NamedTuple

from symphony.launcher.common.surroundings import surroundings
from symphony.launcher.machine.processes import ZYGOTE_OF


class StartedZygote(NamedTuple):
    """A zygote that was started. The zygote serves once it has loaded libsym."""

    pid: int
    connection: socket.socket


def start_zygote(directory: str) -> StartedZygote:
    """Start a zygote.
    `directory`: the launcher's directory, which marks the environment of the zygote and its forks.
    """
    connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"from symphony.launcher.zygote.zygote import main; main({theirs.fileno()})"
    theirs.set_inheritable(True)
    with theirs:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-u", "-c", code],
            {**surroundings(), ZYGOTE_OF: directory},
            setsigdef=range(1, 32),
        )
    return StartedZygote(pid, connection)
