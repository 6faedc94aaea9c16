"""A LIP in the daemon: one connection, the identity that the kernel reports, and a table of handles."""

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
from scheduler.wire.replies import Reply

MAX_LATER = 1024
"""Maximum number of waiting calls of one program; libsym has the same limit.

The daemon keeps the requests of these calls.
"""
MAX_WAITS = 1000
"""Maximum number of calls that wait for messages or locks. The program's library needs room for the replies that end
these waits.
"""


class Cancellable(Protocol):
    """Call that can be cancelled: see `SystemCall`."""

    @property
    def request(self) -> Request: ...

    @property
    def is_answered(self) -> bool: ...

    def cancel(self) -> None: ...

    def forget(self) -> None: ...


@dataclass(slots=True, eq=False)
class Lip:
    """Connection of a program, with handle numbers of its own, so no number reaches another program's file."""

    pid: int
    credentials: Credentials
    channel: ServerChannel
    handles: Handles = field(default_factory=Handles)
    since_ns: int = field(default_factory=time.time_ns)
    num_later: int = 0
    """Number of calls that wait for an event."""
    calls: dict[int, Cancellable] = field(default_factory=dict)
    """Calls that CANCEL can end or whose result CANCEL can take back, by the id of the request."""
    tied: dict[int, set[Cancellable]] = field(default_factory=dict)
    """Calls that are tied to a handle, by handle: generations, which another operation on the file ends, and claims,
    which CANCEL can take back while the handle is open.
    """
    nap: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Scope of the task that waits until the program rings the doorbell."""
    under_way: UnderWay = field(default_factory=lambda: UnderWay(UserBytes()))
    """Bytes of the connection's requests in flight."""
    holdings: Holdings = field(default_factory=Holdings)
    """Holdings of the connection's user; until the connection joins, holdings of no user."""
    launched: Program | None = None
    """Program to which the connection belongs, according to the launcher."""
    program: Program = field(init=False)
    """Program that the connection belongs to. Until the connection joins, this field has a temporary program."""
    stream: int = 0
    """Stream of the call that is handled now: see libsym-abi(7)."""
    model: int = 0
    """Number of the model whose tokenizer the connection uses, and which its new files get."""
    slots: Slots = field(init=False)
    """Result slots, and the calls that wait for slots."""

    def __post_init__(self) -> None:
        self.slots = Slots(self.channel, self.handles.core)
        self.holdings.charge(Kind.CONNECTION)
        self.program = Program.of_nobody(self.pid, self.uid, self.gid)

    def charge_to(self, holdings: Holdings) -> None:
        """Charge the connection, and all that it opens from now on, to its user."""
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
        """Return the fields of log lines about the LIP."""
        return {"program": self.pid, "user": self.uid}

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Return the bytes of requests and of replies that have passed through the rings."""
        return self.channel.num_bytes

    @property
    def waits_for(self) -> Counter[Op]:
        """Count the calls that wait for an event, by operation."""
        return Counter(call.request.op for call in self.calls.values() if not call.is_answered)

    def wake(self) -> None:
        """Look at the connection's ring although the program has not rung."""
        self.nap.cancel()

    def free_rows(self, first: int, num_rows: int) -> None:
        """Free the slots of a failed call, and serve the calls that wait.

        `first` below 0: the failed call had no slots yet.
        """
        if first >= 0:
            self.channel.free_rows(first, num_rows)
        self.slots.serve()

    def add(self, file: OpenKv) -> int:
        """Add a handle for the file and return its number."""
        handle = self.handles.add(file)
        self.holdings.charge(Kind.HANDLE)
        self.program.page_seconds.opened(file.table)
        return handle

    def opened(self, file: OpenKv) -> Reply:
        """Return the reply for a newly opened file: handle, number of entries, inode, and the directory of its name.

        If the file lost entries, the payload is the number of lost entries.
        """
        return self._told(self.add(file), file)

    def place_of(self, file: OpenKv) -> Reply:
        """Return the same reply as `opened` for a file that is open already, without a handle."""
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
        """Remove a handle and end its calls in flight. Return the file."""
        file = self.file(handle)
        self.end_generations(handle)
        for call in tuple(self.tied.get(handle, ())):
            call.forget()
        self.handles.remove(handle)
        self.holdings.let_go(Kind.HANDLE)
        self.program.page_seconds.closed(file.table)
        return file

    def take(self, count: int) -> list[OpenKv]:
        """Remove up to `count` handles of a program that has gone, and return their files."""
        files = self.handles.take(count)
        for file in files:
            self.holdings.let_go(Kind.HANDLE)
            self.program.page_seconds.closed(file.table)
        return files

    def end_generations(self, handle: int) -> None:
        """End the handle's generations. A generation may take seconds, and closing the file would wait for its end."""
        for call in [each for each in self.tied.get(handle, ()) if each.request.op is Op.GENERATE]:
            call.cancel()

    def untie(self, handle: int, call: Cancellable) -> None:
        calls = self.tied[handle]
        calls.discard(call)
        if not calls:
            del self.tied[handle]

    def forget_calls(self) -> None:
        """Drop the calls' references to a program that has gone."""
        for call in tuple(self.calls.values()):
            call.forget()
