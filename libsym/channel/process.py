"""The connection of this process. The first call makes it, and all threads share it. Two processes never share a
connection.

When the daemon dies, every call fails with NotConnected until the program calls `connect()`. There is no automatic
reconnection, because the program has to know that its handles and anonymous files are lost. If the daemon was never
reached, each call tries again.

A program may have further connections (`connection`), for example one for each domain. A call without an open file uses
the connection of its thread or task, which a context variable holds.
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
from libsym.arguments import Path, model_name, path_bytes, path_text, shown
from libsym.channel.client import ClientChannel
from libsym.channel.handshake import dial
from libsym.channel.socket_path import find_socket
from libsym.errors import Invalid, NotConnected

_in_use: ContextVar[ClientChannel | None] = ContextVar("libsym connection", default=None)
"""The connection that this thread or task uses in place of the process's own."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25
"""Pauses between tries to reach a daemon. The pauses grow, so that a thousand waiting programs cost little."""


class Process:
    """The connections of this process, and their end in a child of a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: ClientChannel | None = None
        self._domain: str | None = None
        self._parents: tuple[str, str] | None = None
        """Socket and domain of the parent of a fork, if the parent was confined. The child is confined to the same
        domain.
        """
        self._more: WeakSet[ClientChannel] = WeakSet()
        os.register_at_fork(after_in_child=self._forget)

    @property
    def connected(self) -> ClientChannel | None:
        """The connection of this thread or task, else the process's own, or None. Reading this property never waits."""
        return _in_use.get() or self._channel

    def channel(self) -> ClientChannel:
        """Return the connection of this thread or task, else the process's own. The first call connects."""
        found = _in_use.get() or self._channel
        return found if found is not None else self.connect(None)

    def another(self, socket: str | None, domain: str | None, model: str | None = None) -> ClientChannel:
        """Make a connection in addition to the process's own."""
        new = _connected(str(find_socket()) if socket is None else socket, domain, model)
        self._more.add(new)
        return new

    def connect(self, socket: str | None, domain: str | None = None) -> ClientChannel:
        """Connect to `socket` or the default socket, confined to `domain` if one is given.

        A live connection to the same daemon and domain is kept. Any other old connection is closed.
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
        """Forget the parent's connections, in the child of a fork.

        The lock is made anew, because a thread of the parent may have held it.
        """
        self._lock = threading.Lock()
        for channel in self._more:
            channel.disown()
        if self._channel is not None:
            self._channel.disown()
            if self._domain is not None:
                self._parents = self._channel.name, self._domain
            self._channel = self._domain = None


def _connected(path: str, domain: str | None, model: str | None = None) -> ClientChannel:
    channel = ClientChannel(*dial(path), path)
    try:
        if domain is not None:
            channel.call(Op.CONFINE, payload=path_bytes(domain))
        if model is not None:
            channel.call(Op.USE_MODEL, payload=model_name(model))
    except BaseException:
        channel.close()
        raise
    return channel


class Connection:
    """An additional connection of this process: see `connection`.

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
        """The directory that the connection is confined to. None: the connection is not confined."""

    @property
    def channel(self) -> ClientChannel:
        return self._channel

    @property
    def is_open(self) -> bool:
        """Whether the connection can make calls: it was not closed, and the daemon is there."""
        return self._channel.daemon_is_there()

    @contextmanager
    def use(self) -> Iterator[Self]:
        """Use the connection for calls of this thread or task in a `with` block, and of tasks that start in the block.

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
        """End this connection. Its files are closed, waiting calls get NotConnected, a Dist stays readable.

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
    """Return the pauses between tries to connect. The last try comes `wait` seconds from now."""
    if wait is not None and (not isinstance(wait, (int, float)) or not wait >= 0):  # false for NaN
        raise Invalid(f"wait={shown(wait)}: give seconds, or None for one try")
    return _pauses_until(time.monotonic() + (wait or 0))


def _pauses_until(deadline_s: float) -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


process = Process()
"""The only module-level state of the library, because a connection belongs to the whole process."""


def connect(
    socket: str | os.PathLike[str] | None = None, *, domain: Path | None = None, wait: float | None = None
) -> None:
    """Connect this process to the daemon at `socket`, or at SYMPHONY_SOCKET, or at the default place.

    The first system call connects by itself. Call `connect` for another socket, or to reconnect after a restart of the
    daemon. Until then every call raises NotConnected, because earlier handles and anonymous files are lost. A live
    connection to the same daemon is kept.

    `domain`: a directory that belongs to the caller and has a quota (`user.kv.quota`). The connection is confined to
    the directory: paths begin there and cannot leave it (CrossDevice), and anonymous files count towards its quota. The
    connection stays confined until it ends. A child made by fork() is confined, too.

    `wait`: if no daemon can be reached, try again for this many seconds before NotConnected is raised. Use `wait` if
    the program may start before the daemon, or during the daemon's restart.

    >>> sym.connect()  # keeps a live connection
    >>> try:
    ...     tokens = sym.tokenize("Be brief.")
    ... except sym.NotConnected:
    ...     sym.connect(wait=30)  # what was open has to be opened again
    """
    path, inside = None if socket is None else path_text(socket), None if domain is None else path_text(domain)
    _try(lambda: process.connect(path, inside), wait)


def connection(
    socket: str | os.PathLike[str] | None = None,
    *,
    domain: Path | None = None,
    model: str | None = None,
    wait: float | None = None,
) -> Connection:
    """Make an additional connection, with the arguments of `connect`: for a program that serves several parties.

    Calls in a `with` block of the connection use it, and the end of the block closes it. The end of a `with` block of
    `use()` does not close it. A call on an open file goes over that file's connection. Each connection has its own open
    files, mailbox and topics, and a domain if one is given. Other programs see one program, with one pid. In a child of
    fork(), calls over the connection raise BadHandle.

    `model`: the name of the model whose tokenizer and template the connection uses, and which its new files get. None:
    the daemon's default model.

    >>> with sym.connection():
    ...     kv = sym.kv_create("a.kv")
    >>> kv.closed, sym.kv_list()[0].name
    (False, 'a.kv')
    """
    path, inside = None if socket is None else path_text(socket), None if domain is None else path_text(domain)
    return Connection(_try(lambda: process.another(path, inside, model), wait), inside)


def _try(connect: Callable[[], ClientChannel], wait: float | None) -> ClientChannel:
    """Call `connect` until a daemon answers, for at most `wait` seconds."""
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
    """End the connection of this process. Its files are closed, waiting calls get NotConnected, a Dist stays readable.

    >>> kv = sym.kv_create("a.kv")
    >>> sym.close()
    >>> sym.kv_list()[0].name  # the next call connects again
    'a.kv'
    """
    process.close()
