"""A file that is open at the daemon: a handle, and what becomes of it when the object goes."""

from __future__ import annotations

from typing import NoReturn

from libsym.client_channel import ClientChannel
from libsym.errors import BadHandle, Invalid


class OpenFile:
    """A handle on a connection. It is given back with the next call after the object is gone, if not before."""

    __slots__ = ("__weakref__", "_channel", "_handle", "path", "writable")

    def __init__(self, channel: ClientChannel, handle: int, path: str | None, *, writable: bool) -> None:
        self._channel = channel
        self._handle = handle
        self.path = path
        """The name that it was opened by; None: it has none."""
        self.writable = writable

    @property
    def handle(self) -> int:
        """The number that the daemon knows the file by, on this connection."""
        if self._handle == 0:
            raise BadHandle(f"{self.name} is closed: open it again")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle == 0

    @property
    def channel(self) -> ClientChannel:
        """The connection that the file is open on."""
        return self._channel

    @property
    def name(self) -> str:
        """What messages call it."""
        return "this anonymous KV file" if self.path is None else self.path

    def give_up(self) -> int:
        """The handle, for whoever closes it now: to the program the file is closed. 0: it was already."""
        handle, self._handle = self._handle, 0
        return handle

    def __repr__(self) -> str:
        state = f"handle {self._handle}" if self._handle else "closed"
        return f"<{type(self).__name__} {self.path or 'anonymous'}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise Invalid(
            f"{self.name} can't be copied or pickled: fork() copies it, kv_open() opens it in another process"
        )

    def __del__(self) -> None:
        # Must not wait and must not fail: the channel sends the close with the next call.
        if getattr(self, "_handle", 0):
            self._channel.close_later(self.give_up())
