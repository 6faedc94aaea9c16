"""A client of a launcher: finds it, or starts it, and speaks with it."""

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
from symphony.launcher import wire
from symphony.launcher.places import Places, Refused, make
from symphony.launcher.surroundings import surroundings

IDLE_S = 60.0
"""A launcher that nobody needs goes after so long."""
START_TIMEOUT_S = 20.0
_PAUSE_S = 0.003
Message = dict[str, Any]


class NoDaemonAnswer(Refused):
    """The launcher finds no daemon."""


def request(places: Places, message: Message) -> Message:
    """One question, one answer. Refused: what the launcher says."""
    with opened(places, message) as connection:
        return answer(connection)


def ask_living(places: Places, message: Message) -> Message | None:
    """As `request`, of the launcher that there is. None: there is none, and none is started for this."""
    connection = _dial(places) if places.control.exists() else None
    if connection is None:
        return None
    with connection:
        wire.send(connection, message)
        return answer(connection)


def opened(places: Places, message: Message) -> socket.socket:
    """A connection that has a request on its way."""
    connection = _connected(places)
    wire.send(connection, message)
    return connection


def answer(connection: socket.socket) -> Message:
    """The launcher's next message that is no stream's. Refused: it says no, or has gone."""
    kind, content = wire.receive(connection)
    if kind != wire.JSON:
        raise Refused("the launcher went away: its programs have ended (its log is launcher.log in its directory)")
    message: Message = content
    if "error" in message:
        raise (NoDaemonAnswer if message.get("no_daemon") else Refused)(message["error"], message["status"])
    return message


def _connected(places: Places) -> socket.socket:
    """To the launcher that there is, or to a new one."""
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
    """None: there is no launcher, or it is about to go."""
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
    """By us, now; else a launcher lives, or somebody starts one."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return False
    return True


def _start(places: Places, lock: int) -> None:
    """A launcher in a session of its own, that holds the lock; returns when it listens."""
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
"""Descriptors of the launcher; the second is only there to hold the lock."""


def check_daemon(places: Places) -> None:
    """Before a launcher is started in vain. Refused: no daemon is there, in the words of every command."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with probe:
        try:
            probe.connect(places.programs_socket)
        except OSError as error:
            raise no_daemon(places, f"{places.programs_socket}: {error.strerror or error}") from None


def no_daemon(places: Places, why: str) -> Refused:
    """What to tell a user when the daemon takes no launcher."""
    try:
        libsym.connect(places.daemon)
    except (NotConnected, SymError) as error:
        return Refused(str(error))
    libsym.close()
    return Refused(f"the daemon at {places.daemon} runs no programs ({why}): start one of this release")
