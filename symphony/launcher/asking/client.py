"""Client of a launcher: finds the running launcher, or starts a launcher, and sends requests to it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from typing import Any

import libsym
from libsym.errors import NotConnected, SymError
from symphony.launcher.common import wire
from symphony.launcher.common.places import Places, Refused, make
from symphony.launcher.common.surroundings import surroundings

IDLE_S = 60.0
"""Time after which a launcher without programs and clients ends."""
START_TIMEOUT_S = 20.0
_PAUSE_S = 0.003
Message = dict[str, Any]


class NoDaemonAnswer(Refused):
    """Error: the launcher finds no daemon."""


def request(places: Places, message: Message) -> Message:
    """Send a request and return the answer. Refused: the launcher refuses, or can't be started."""
    with opened(places, message) as connection:
        return answer(connection)


def ask_living(places: Places, message: Message) -> Message | None:
    """Send a request to the running launcher, and return its answer.
    None: no launcher runs. This function never starts a launcher.
    """
    connection = _dial(places) if places.control.exists() else None
    if connection is None:
        return None
    with connection:
        wire.send(connection, message)
        return answer(connection)


def opened(places: Places, message: Message) -> socket.socket:
    """Send a request, and return the connection on which the answers arrive."""
    connection = _connected(places)
    wire.send(connection, message)
    return connection


def answer(connection: socket.socket) -> Message:
    """Return the launcher's next JSON message. Refused: the launcher refuses, or has ended."""
    kind, content = wire.receive(connection)
    if kind != wire.JSON:
        raise Refused("the launcher went away: its programs have ended (its log is launcher.log in its directory)")
    message: Message = content
    if "error" in message:
        raise (NoDaemonAnswer if message.get("no_daemon") else Refused)(message["error"], message["status"])
    return message


def _connected(places: Places) -> socket.socket:
    """Return a connection to the launcher. Start a launcher if none runs."""
    make(places)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        connection = _dial(places)
        if connection is not None:
            return connection
        try:
            lock = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _is_locked(lock):
                    _start(places, lock)
            finally:
                os.close(lock)
        except OSError as error:
            raise Refused(f"the launcher can't be started: {error.filename}: {error.strerror}") from None
        if time.monotonic() > deadline_s:
            raise Refused(f"the launcher does not start: see {places.log}")
        time.sleep(_PAUSE_S)


def _dial(places: Places) -> socket.socket | None:
    """Connect to a running launcher. None: no launcher runs, or it is about to end."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(places.control))
        if wire.receive(connection)[0] == wire.JSON:
            return connection
    except (FileNotFoundError, ConnectionError):
        pass
    except OSError as error:
        connection.close()
        raise Refused(f"the launcher at {places.control} can't be reached: {error.strerror or error}") from None
    connection.close()
    return None


def _is_locked(lock: int) -> bool:
    """Lock the launcher's lock file. False: a launcher runs, or another client starts a launcher."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return False
    return True


def _start(places: Places, lock: int) -> None:
    """Start a launcher in a new session, and return when it listens. The launcher inherits the lock."""
    ready, theirs = os.pipe2(os.O_CLOEXEC)
    log = os.open(places.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    words = [str(places.directory), places.daemon, str(_READY), str(IDLE_S)]
    null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOCK + 1) for fd in (log, log, theirs, lock)]
    copies = [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in zip(above, (1, 2, _READY, _LOCK), strict=True)]
    try:
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "symphony.launcher", *words],
            surroundings(),
            file_actions=[null, *copies],
            setsid=True,
            setsigdef=range(1, 32),
            setsigmask=[],
        )
        for fd in (theirs, *above):
            os.close(fd)
        theirs, above = -1, []
        if not os.read(ready, 1):
            raise Refused(f"the launcher does not start: see {places.log}")
    finally:
        for fd in {ready, theirs, log, *above} - {-1}:
            os.close(fd)


_READY, _LOCK = 3, 4
"""Descriptors in the launcher: `_READY`, to report that the launcher listens, and `_LOCK`, which holds the lock."""


def check_daemon(places: Places) -> None:
    """Check that the daemon accepts launchers, to avoid a start in vain. Refused: the daemon does not answer."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with probe:
        try:
            probe.connect(places.programs_socket)
        except OSError as error:
            raise no_daemon(places, f"{places.programs_socket}: {error.strerror or error}") from None


def no_daemon(places: Places, why: str) -> Refused:
    """Return the error for a daemon that accepts no launcher: the daemon is missing, or of another release."""
    try:
        libsym.connect(places.daemon)
    except (NotConnected, SymError) as error:
        return Refused(str(error))
    libsym.close()
    return Refused(f"the daemon at {places.daemon} runs no programs ({why}): start one of this release")
