"""A LIP as the daemon sees it: one connection, who the kernel says it is, and its own table of handles."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import trio

from kvfs.fs import OpenKv
from kvfs.names.tree import Credentials
from kvfs.pages.holdings import Holdings, Kind
from libsym.abi import Op
from libsym.channel.server import Request, ServerChannel
from libsym.errors import BadHandle
from scheduler.connection.handles import Handles
from scheduler.connection.slots import Slots
from scheduler.connection.under_way import UnderWay, UserBytes
from scheduler.programs.program import Program
from scheduler.replies import Reply

MAX_LATER = 1024
"""Calls of one program that wait at once, as many as its library has: each holds its request in our memory."""
MAX_WAITS = 1000
"""With so many no more may wait for a message or a lock: its library has to have room for what ends such a wait."""


class Cancellable(Protocol):
    """A call: see `SystemCall`."""

    @property
    def request(self) -> Request: ...

    @property
    def is_answered(self) -> bool: ...

    def cancel(self) -> None: ...

    def forget(self) -> None: ...


@dataclass(slots=True, eq=False)
class Lip:
    """A connected program. Handles are its own: no number that it sends can name another's file."""

    pid: int
    credentials: Credentials
    channel: ServerChannel
    handles: Handles = field(default_factory=Handles)
    since_ns: int = field(default_factory=time.time_ns)
    num_later: int = 0
    """Calls that are under way and will be answered when something has happened."""
    calls: dict[int, Cancellable] = field(default_factory=dict)
    """Calls that CANCEL can end, or whose answer it can take back, by the request's id."""
    tied: dict[int, set[Cancellable]] = field(default_factory=dict)
    """By handle: generations, which end when something else is done to their file; and the claim that the handle is,
    which can be taken back while it is open."""
    nap: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Of whoever waits for the program to ring."""
    under_way: UnderWay = field(default_factory=lambda: UnderWay(UserBytes()))
    """Bytes of its requests."""
    holdings: Holdings = field(default_factory=Holdings)
    """Things that the daemon keeps for its user; for nobody until it has joined."""
    launched: Program | None = None
    """Program that the launcher says the connection belongs to."""
    program: Program = field(init=False)
    """Program that the connection belongs to: one of its own until the connection has joined."""
    stream: int = 0
    """Stream of the call that is handled now: see libsym-abi(7)."""
    slots: Slots = field(init=False)
    """Calls that wait for result slots, and the slots."""

    def __post_init__(self) -> None:
        self.slots = Slots(self.channel, self.handles.core)
        self.holdings.charge(Kind.CONNECTION)
        self.program = Program.of_nobody(self.pid, self.uid, self.gid)

    def charge_to(self, holdings: Holdings) -> None:
        """The program joins: its user has the connection, and all that it opens, from now on."""
        holdings.charge(Kind.CONNECTION)
        self.holdings = holdings

    @property
    def uid(self) -> int:
        return self.credentials.uid

    @property
    def gid(self) -> int:
        return self.credentials.gid

    @property
    def subject(self) -> dict[str, object]:
        """For lines of the log about it."""
        return {"program": self.pid, "user": self.uid}

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Of its requests and of their replies, in the rings."""
        return self.channel.num_bytes

    @property
    def waits_for(self) -> Counter[Op]:
        """Count, by operation, the calls that will be answered when something has happened."""
        return Counter(call.request.op for call in self.calls.values() if not call.is_answered)

    def wake(self) -> None:
        """Look at its ring although it has not rung."""
        self.nap.cancel()

    def free_rows(self, first: int, num_rows: int) -> None:
        """Calls that wait get the slots of a call that failed. `first` below 0: that one waited for slots itself."""
        if first >= 0:
            self.channel.free_rows(first, num_rows)
        self.slots.serve()

    def add(self, file: OpenKv) -> int:
        """A new handle."""
        handle = self.handles.add(file)
        self.holdings.charge(Kind.HANDLE)
        self.program.page_seconds.opened(file.table)
        return handle

    def opened(self, file: OpenKv) -> Reply:
        """A new handle, as a reply tells it: with the entries, and the inode and the directory that it was found by.

        The payload, of a file that lost entries, is their number.
        """
        return self._told(self.add(file), file)

    def place_of(self, file: OpenKv) -> Reply:
        """Where an open file is now: a reply as `opened`'s, without a handle."""
        return self._told(0, file)

    @staticmethod
    def _told(handle: int, file: OpenKv) -> Reply:
        directory = 0 if file.origin is None else file.origin[0]
        lost = file.content.lost
        payload = lost.to_bytes(8, "little") if lost else b""
        return Reply((handle, file.table.length, file.inode.number, directory), payload)

    def file(self, handle: int) -> OpenKv:
        try:
            return self.handles[handle]
        except KeyError:
            raise BadHandle(f"handle {handle} is not open in this program") from None

    def remove(self, handle: int) -> OpenKv:
        """The handle ends, and what was under way for it; the file is the caller's."""
        file = self.file(handle)
        self.end_generations(handle)
        for call in tuple(self.tied.get(handle, ())):
            call.forget()
        self.handles.remove(handle)
        self.holdings.let_go(Kind.HANDLE)
        self.program.page_seconds.closed(file.table)
        return file

    def take(self, count: int) -> list[OpenKv]:
        """Give up so many of its handles: the program has gone."""
        files = self.handles.take(count)
        for file in files:
            self.holdings.let_go(Kind.HANDLE)
            self.program.page_seconds.closed(file.table)
        return files

    def end_generations(self, handle: int) -> None:
        """End those that this handle started: they go on for seconds, and whoever closes the file waits for them."""
        for call in [each for each in self.tied.get(handle, ()) if each.request.op is Op.GENERATE]:
            call.cancel()

    def untie(self, handle: int, call: Cancellable) -> None:
        calls = self.tied[handle]
        calls.discard(call)
        if not calls:
            del self.tied[handle]

    def forget_calls(self) -> None:
        """The program has gone: each call refers to it."""
        for call in tuple(self.calls.values()):
            call.forget()
