"""A program as the daemon knows it: what was started, with all its connections, and what they have used together."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvfs.bell import Bell
from libsym.abi import Op
from scheduler.programs.limits import NO_LIMITS, OverLimit, ProgramLimits
from scheduler.programs.link import Link
from scheduler.programs.page_seconds import PageSeconds
from scheduler.programs.used import Used

MAX_ID = 8
"""Hexadecimal digits."""


class Connection(Protocol):
    """A connection of the program: a `Lip`."""

    @property
    def pid(self) -> int: ...

    @property
    def uid(self) -> int: ...

    @property
    def gid(self) -> int: ...

    @property
    def handles(self) -> Sized: ...

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Of requests and of replies, until now."""
        ...

    @property
    def waits_for(self) -> Mapping[Op, int]:
        """Numbers of calls, by operation, that will be answered when something has happened."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program."""

    status: int | None
    """None: nobody said."""
    reason: str
    ns: int


@dataclass(frozen=True, slots=True)
class Over:
    """The limit that a program has reached."""

    what: str
    text: str


class Exceeded:
    """Programs that have reached a limit, and the bell of the task that ends their calls."""

    def __init__(self) -> None:
        self._programs: list[Program] = []
        self.bell = Bell()

    def add(self, program: Program) -> None:
        self._programs.append(program)
        self.bell.ring()

    def take(self) -> list[Program]:
        """Programs that were added since this was called last."""
        found, self._programs = self._programs, []
        return found


@dataclass(slots=True, eq=False)
class Program:
    """A program that was started; it outlives its connections. All of it on the trio thread."""

    id: str
    name: str
    pid: int | None
    """Of its first process; None: that does not run yet."""
    start: int
    """When that started, see `process_state`; 0: not known."""
    uid: int
    gid: int
    user: Used = field(default_factory=Used)
    """Counts of all programs of the user."""
    parent: str | None = None
    limits: ProgramLimits = NO_LIMITS
    is_launched: bool = False
    """By a launcher, which says when it has ended."""
    began_ns: int = field(default_factory=time.time_ns)
    used: Used = field(default_factory=Used)
    page_seconds: PageSeconds = field(default_factory=PageSeconds)
    connections: dict[Connection, None] = field(default_factory=dict)
    num_promised: int = 0
    """Tokens of calls that have their room and are not computed yet."""
    num_guests: int = 0
    """Texts that it is writing through the mount: see `TextPrefill`."""
    link: Link | None = None
    """The launcher, while that is connected."""
    alone_since_s: float = field(default_factory=time.monotonic)
    """When it lost its last connection, or its launcher's."""
    over: Over | None = None
    ended: Ended | None = None
    exceeded: Exceeded | None = None
    """None: no list has the program."""
    _gone_bytes: tuple[int, int] = (0, 0)
    """Of connections that have gone."""

    @classmethod
    def of_nobody(cls, pid: int, uid: int, gid: int = 0) -> Program:
        """Return a program that no list has: of a connection that has not joined yet."""
        return cls(new_id(), "", pid, 0, uid, gid)

    @property
    def subject(self) -> dict[str, object]:
        """For lines of the log about it."""
        return {"program": self.id if self.pid is None else self.pid, "user": self.uid}

    # ---- what it has used

    def add(self, connection: Connection) -> None:
        """Take one more connection."""
        self.connections[connection] = None

    def remove(self, connection: Connection) -> None:
        """Before the connection is closed: what went over it is counted."""
        requests, replies = connection.num_bytes
        self._gone_bytes = self._gone_bytes[0] + requests, self._gone_bytes[1] + replies
        del self.connections[connection]
        self.alone_since_s = time.monotonic()

    def measure(self, page_seconds: float | None = None) -> Used:
        """Return the usage until now; what is not counted as it is used is looked at here. `page_seconds`: is known."""
        used, user = self.used, self.user
        page_seconds = max(used.page_seconds, self.page_seconds.total() if page_seconds is None else page_seconds)
        pairs = [each.num_bytes for each in self.connections]
        bytes_in = self._gone_bytes[0] + sum(pair[0] for pair in pairs)
        bytes_out = self._gone_bytes[1] + sum(pair[1] for pair in pairs)
        user.page_seconds += page_seconds - used.page_seconds
        user.bytes_in += bytes_in - used.bytes_in
        user.bytes_out += bytes_out - used.bytes_out
        used.page_seconds, used.bytes_in, used.bytes_out = page_seconds, bytes_in, bytes_out
        return used

    def take_up(self, used: Used) -> None:
        """Go on from the usage before the daemon was started anew; the user's counters began with the daemon."""
        self.used = used
        self.page_seconds = PageSeconds(used.page_seconds)
        self._gone_bytes = used.bytes_in, used.bytes_out

    # ---- limits

    def require(self, num_tokens: int, num_pages: int) -> None:
        """OverLimit: it may not compute so many more tokens, or have so many more pages. It is over with it then."""
        if self.over is None and self.limits.is_any:
            self._look(num_tokens, num_pages)
        if self.over is not None:
            raise self.over_limit()

    @property
    def num_tokens_left(self) -> int | None:
        """Tokens that it may still compute; None: there is no limit."""
        return None if self.limits.tokens is None else max(0, self.limits.tokens - self.used.tokens - self.num_promised)

    def over_limit(self) -> OverLimit:
        """The error that the program's calls fail with from now on."""
        assert self.over is not None
        return OverLimit(self.over.text)

    def look(self) -> None:
        """Whether it has reached a limit by what nobody asks about: a loop in C, time that goes by."""
        if self.over is None and self.limits.is_any:
            self._look(0, 0)
            most = self.limits.page_seconds
            if self.over is None and most is not None and self.page_seconds.total() > most:
                self._exceed("page_seconds", f"it has had pages for more than {most:g} page-seconds")

    def _look(self, num_tokens: int, num_pages: int) -> None:
        limits, num_used = self.limits, self.used.tokens
        # What others of its calls are computing was granted: by itself that is no reason to end it.
        num_wanted = num_tokens and num_tokens + self.num_promised
        if limits.tokens is not None and num_used + num_wanted > limits.tokens:
            under_way = f", {self.num_promised} are under way" if self.num_promised else ""
            more = f"{under_way}, and it asks for {num_tokens} more" if num_tokens else ""
            self._exceed("tokens", f"it has computed {num_used} of its {limits.tokens} tokens{more}")
        elif limits.pages is not None and self.page_seconds.num_pages + num_pages > limits.pages:
            # Files that share pages count them each so far.
            num_had = self.page_seconds.num_distinct_pages()
            if num_had + num_pages > limits.pages:
                more = f", and asks for {num_pages} more" if num_pages else ""
                self._exceed("pages", f"it has {num_had} of its {limits.pages} pages{more}")

    def _exceed(self, what: str, why: str) -> None:
        self.over = Over(what, f"program {self.name} ({self.id}) is over its limit on {what}: {why}")
        if self.exceeded is not None:
            self.exceeded.add(self)

    # ---- what is told of it

    @property
    def process(self) -> tuple[int, int, int] | None:
        """Identity of a process that no launcher has named: pid, start time, uid."""
        return None if self.pid is None else (self.pid, self.start, self.uid)

    @property
    def num_handles(self) -> int:
        """Handles that the connections have open."""
        return sum(len(each.handles) for each in self.connections)

    @property
    def has_anybody(self) -> bool:
        """Something of it may still use the model."""
        return bool(self.connections or self.num_guests)

    def facts(self) -> dict[str, Any]:
        """Return the facts that need nobody else, nor long."""
        found: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "pid": self.pid,
            "uid": self.uid,
            "parent": self.parent,
            "started": self.began_ns * 1e-9,
            "connections": len(self.connections),
            "pages": self.page_seconds.num_pages_lately,
            "usage": self.used.facts(),
            "limits": self.limits.facts(),
        }
        if self.ended is not None:
            found |= {"status": self.ended.status, "reason": self.ended.reason, "ended": self.ended.ns * 1e-9}
        return found


def new_id() -> str:
    """As launchers make them."""
    return os.urandom(MAX_ID // 2).hex()
