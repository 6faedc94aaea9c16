"""The connection of this process: made with the first call, shared by all threads, never by two processes.

When the daemon dies, every call fails with NotConnected until the program says `connect()`. A new connection behind its
back would be worse: handles are the old daemon's, and anonymous files went with it; the program has to know. A daemon
that was never reached is another matter: then each call tries again.

A program may have more of them (`connection`), each confined to a domain of its own, say. Which one a call takes that
is given no open file is the affair of the thread or task that makes it, so it is a context variable.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self
from weakref import WeakSet

from libsym.abi import Op
from libsym.arguments import Path, path_bytes, path_text, shown
from libsym.channel.client import ClientChannel
from libsym.channel.handshake import dial
from libsym.channel.socket_path import find_socket
from libsym.errors import Invalid, NotConnected

_in_use: ContextVar[ClientChannel | None] = ContextVar("libsym connection", default=None)
"""What calls of this thread or task take in place of the process's own connection."""
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
        self._more: WeakSet[ClientChannel] = WeakSet()
        os.register_at_fork(after_in_child=self._forget)

    @property
    def connected(self) -> ClientChannel | None:
        """The connection if there is one already: what a task may ask for, because it never waits."""
        return _in_use.get() or self._channel

    def channel(self) -> ClientChannel:
        """The connection that a call takes here: the one in use, else the process's own, made if there is none yet."""
        found = _in_use.get() or self._channel
        return found if found is not None else self.connect(None)

    def another(self, socket: str | None, domain: str | None) -> ClientChannel:
        """A connection beside the process's own."""
        new = _connected(str(find_socket()) if socket is None else socket, domain)
        self._more.add(new)
        return new

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
        for channel in self._more:
            channel.disown()
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


class Connection:
    """One more connection of this process: see `connection`.

    >>> with sym.connection() as other:
    ...     kv = sym.kv_create("a.kv")
    >>> other, kv.channel is other.channel
    (<Connection: closed>, True)
    """

    __slots__ = ("_block", "_channel", "domain")

    def __init__(self, channel: ClientChannel, domain: str | None) -> None:
        self._channel = channel
        self._block: AbstractContextManager[Self] | None = None
        self.domain = domain
        """The directory that it is confined to, if it is."""

    @property
    def channel(self) -> ClientChannel:
        return self._channel

    @property
    def is_open(self) -> bool:
        """Whether calls can be made: it was not closed, and the daemon is there."""
        return self._channel.daemon_is_there()

    @contextmanager
    def use(self) -> Iterator[Self]:
        """Calls of this thread or task go over it in this block, and so do those of tasks that are started there.

        >>> one, other = sym.connection(), sym.connection()
        >>> with one.use():
        ...     kv = sym.kv_create("a.kv")
        >>> with other.use():
        ...     sym.kv_list()[0].name
        'a.kv'
        >>> one.close(), other.close()
        (None, None)
        """
        before = _in_use.set(self._channel)
        try:
            yield self
        finally:
            _in_use.reset(before)

    def close(self) -> None:
        """Ends the connection, as `libsym.close` ends the process's own.

        >>> other = sym.connection()
        >>> other.close()
        >>> other
        <Connection: closed>
        """
        self._channel.close()

    def __enter__(self) -> Self:
        self._block = self.use()
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._block is not None
        self._block.__exit__(kind, value, trace)
        self.close()

    def __repr__(self) -> str:
        domain = "" if self.domain is None else f" to {self.domain}"
        return f"<Connection{domain}: {'open' if self.is_open else 'closed'}>"


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
    _try(lambda: process.connect(path, inside), wait)


def connection(
    socket: str | os.PathLike[str] | None = None, *, domain: Path | None = None, wait: float | None = None
) -> Connection:
    """One more connection, beside the process's own, with the arguments of `connect`: for a program of several parties.

    A `with` block uses it, and closes it in the end; `use()` uses it as often as need be. A call that is given an open
    file goes over that file's connection. Each has open files, mail and topics of its own, and a domain if one is
    given; to others they are all one program, by its pid. Calls over it raise BadHandle in a child by fork().

    >>> with sym.connection():
    ...     kv = sym.kv_create("a.kv")
    >>> kv.closed, sym.kv_list()[0].name
    (False, 'a.kv')
    """
    path, inside = None if socket is None else path_text(socket), None if domain is None else path_text(domain)
    return Connection(_try(lambda: process.another(path, inside), wait), inside)


def _try(connect: Callable[[], ClientChannel], wait: float | None) -> ClientChannel:
    """Again and again, for so many seconds."""
    again = pauses(wait)
    while True:
        try:
            return connect()
        except NotConnected:
            pause_s = next(again, None)
            if pause_s is None:
                raise
        time.sleep(pause_s)


def close() -> None:
    """Ends the connection: files are closed, waiting calls get NotConnected, distributions stay readable.

    >>> kv = sym.kv_create("a.kv")
    >>> sym.close()
    >>> sym.kv_list()[0].name  # the next call connects again
    'a.kv'
    """
    process.close()
