"""A LIP as the daemon sees it: one connection, who the kernel says it is, and its own table of handles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvfs.fs import OpenKv
from kvfs.tree import Credentials
from libsym.channel import ServerChannel
from libsym.errors import BadHandle


@dataclass(slots=True, eq=False)
class Lip:
    """One connected program. Handles are its own: no number that it sends can name another's file."""

    pid: int
    credentials: Credentials
    channel: ServerChannel
    handles: dict[int, OpenKv] = field(default_factory=dict)
    is_connected: bool = True
    since_ns: int = field(default_factory=time.time_ns)
    num_later: int = 0
    """Calls that a coroutine will answer."""
    _next_handle: int = 1

    def add(self, file: OpenKv) -> int:
        """A new handle; numbers are not used twice, so that a stale one is an error and not another file."""
        handle = self._next_handle
        self._next_handle += 1
        self.handles[handle] = file
        return handle

    def file(self, handle: int) -> OpenKv:
        try:
            return self.handles[handle]
        except KeyError:
            raise BadHandle(f"handle {handle} is not open in this program") from None

    def remove(self, handle: int) -> OpenKv:
        file = self.file(handle)
        del self.handles[handle]
        return file

    def take_all(self) -> Iterator[OpenKv]:
        """Give up every handle: the program has gone."""
        while self.handles:
            yield self.handles.popitem()[1]
