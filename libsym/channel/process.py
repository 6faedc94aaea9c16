"""The connection of this process: made with the first call, shared by all threads, never by two processes.

When the daemon dies, every call fails with NotConnected until the program says `connect()`. A new connection behind its
back would be worse: handles are the old daemon's, and anonymous files went with it; the program has to know. A daemon
that was never reached is another matter: then each call tries again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

from libsym.abi import Op
from libsym.arguments import Path, path_bytes, path_text, shown
from libsym.channel.client import ClientChannel
from libsym.channel.handshake import dial
from libsym.channel.socket_path import find_socket
from libsym.errors import Invalid, NotConnected

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25
"""Between tries to reach a daemon: soon at first, and then a thousand programs that wait for it cost little."""


class Process:
    """The one connection that the calls of this process use, and what a fork does to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: ClientChannel | None = None
        self._domain: str | None = None
        self._parents: tuple[str, str] | None = None
        """Socket and domain of a confined parent: its child by fork must not find itself outside."""
        os.register_at_fork(after_in_child=self._forget)

    @property
    def connected(self) -> ClientChannel | None:
        """The connection if there is one already: what a task may ask for, because it never waits."""
        return self._channel

    def channel(self) -> ClientChannel:
        """The connection, made if there is none yet."""
        found = self._channel
        return found if found is not None else self.connect(None)

    def connect(self, socket: str | None, domain: str | None = None) -> ClientChannel:
        """Connects to `socket` or the default one, confined to `domain` if one is given.

        A live connection to the same daemon and domain stays; another is closed.
        """
        with self._lock:
            old = self._channel
            same = old is not None and socket in (None, old.name) and domain in (None, self._domain)
            if old is not None and same and old.daemon_is_there():
                return old
            if self._parents is not None and (socket, domain) == (None, None):
                socket, domain = self._parents
            path = str(find_socket()) if socket is None else socket
            new = _connected(path, domain)
            self._channel, self._domain, self._parents = new, domain, None
        if old is not None:
            old.close()
        return new

    def close(self) -> None:
        with self._lock:
            old, self._channel = self._channel, None
            self._domain = self._parents = None
        if old is not None:
            old.close()

    def _forget(self) -> None:
        """In the child of a fork. The lock may have been held by a thread that does not exist here."""
        self._lock = threading.Lock()
        if self._channel is not None:
            self._channel.disown()
            if self._domain is not None:
                self._parents = self._channel.name, self._domain
            self._channel = self._domain = None


def _connected(path: str, domain: str | None) -> ClientChannel:
    channel = ClientChannel(*dial(path), path)
    if domain is not None:
        try:
            channel.call(Op.CONFINE, payload=path_bytes(domain))
        except BaseException:
            channel.close()
            raise
    return channel


def pauses(wait: float | None) -> Iterator[float]:
    """How long to pause before each new try to connect, so that the last one is `wait` seconds from now."""
    if wait is not None and (not isinstance(wait, (int, float)) or not wait >= 0):  # NaN is not
        raise Invalid(f"wait={shown(wait)}: give seconds, or None for one try")
    return _pauses_until(time.monotonic() + (wait or 0))


def _pauses_until(deadline_s: float) -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


process = Process()
"""Module state, and the only one of the library: a connection belongs to a process, as its identity does."""


def connect(
    socket: str | os.PathLike[str] | None = None, *, domain: Path | None = None, wait: float | None = None
) -> None:
    """Connects this process to the daemon at `socket` (else SYMPHONY_SOCKET, else the default place).

    Nobody needs to call it: the first system call does. It is for another socket, and for going on after the daemon was
    restarted: until then every call raises NotConnected, because the handles and anonymous files of before are gone.
    A live connection to the same daemon is kept.

    `domain`: a directory of the caller's own that has a quota (`user.kv.quota`). Then the connection is confined to
    it: paths begin there and can't leave it (CrossDevice), and anonymous files count to its quota. It stays confined as
    long as it lives, and so is the one that a child by fork() makes.

    `wait`: where no daemon can be reached, try again for so many seconds before it is NotConnected. It is for a program
    that starts beside the daemon, and for one whose daemon is being restarted.

    >>> sym.connect()  # keeps the connection that there is
    >>> try:
    ...     tokens = sym.tokenize("Be brief.")
    ... except sym.NotConnected:
    ...     sym.connect(wait=30)  # what was open has to be opened again
    """
    path, inside = None if socket is None else path_text(socket), None if domain is None else path_text(domain)
    again = pauses(wait)
    while True:
        try:
            process.connect(path, inside)
        except NotConnected:
            pause_s = next(again, None)
            if pause_s is None:
                raise
        else:
            return
        time.sleep(pause_s)


def close() -> None:
    """Ends the connection: files are closed, waiting calls get NotConnected, distributions stay readable.

    >>> kv = sym.kv_create("a.kv")
    >>> sym.close()
    >>> sym.kv_list()[0].name  # the next call connects again
    'a.kv'
    """
    process.close()
