"""A program in the daemon, with all its connections and their total usage."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvfs.base.bell import Bell
from libsym.abi import Op
from scheduler.programs.limits import NO_LIMITS, OverLimit, ProgramLimits
from scheduler.programs.link import Link
from scheduler.programs.page_seconds import PageSeconds
from scheduler.programs.used import Used

MAX_ID = 8
"""Number of hexadecimal digits in an id."""


class ProgramConnection(Protocol):
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
        """Bytes of requests and of replies until now."""
        ...

    @property
    def waits_for(self) -> Mapping[Op, int]:
        """Number of calls that wait for an event, by operation."""
        ...


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of a program."""

    status: int | None
    """Exit status. None: no launcher reported a status."""
    reason: str
    ns: int


@dataclass(frozen=True, slots=True)
class Over:
    """The limit that a program has reached."""

    what: str
    text: str


class Exceeded:
    """Programs that have reached a limit, and the bell that wakes the task which ends their calls."""

    def __init__(self) -> None:
        self._programs: list[Program] = []
        self.bell = Bell()

    def add(self, program: Program) -> None:
        self._programs.append(program)
        self.bell.ring()

    def take(self) -> list[Program]:
        """Return the programs that were added since the last call."""
        found, self._programs = self._programs, []
        return found


@dataclass(slots=True, eq=False)
class Program:
    """A program that was started. A program outlives its connections. Used on the trio thread."""

    id: str
    name: str
    pid: int | None
    """Pid of the program's first process. None: the process does not run yet."""
    start: int
    """Start time of the first process, see `process_state`. 0: unknown."""
    uid: int
    gid: int
    user: Used = field(default_factory=Used)
    """Usage of all programs of the user."""
    parent: str | None = None
    limits: ProgramLimits = NO_LIMITS
    is_launched: bool = False
    """Whether a launcher started the program. The launcher reports the program's end."""
    began_ns: int = field(default_factory=time.time_ns)
    used: Used = field(default_factory=Used)
    page_seconds: PageSeconds = field(default_factory=PageSeconds)
    connections: dict[ProgramConnection, None] = field(default_factory=dict)
    num_promised: int = 0
    """Number of tokens that were granted to calls in flight, and are not computed yet."""
    num_guests: int = 0
    """Number of guests: texts that the program is writing through the mount, see `TextPrefill`."""
    link: Link | None = None
    """Link to the program's launcher, while the launcher is connected."""
    alone_since_s: float = field(default_factory=time.monotonic)
    """Time at which the program lost its last connection or its launcher."""
    over: Over | None = None
    ended: ProgramEnd | None = None
    exceeded: Exceeded | None = None
    """Collection that the program joins when it reaches a limit. None: the program is in no registry."""
    _gone_bytes: tuple[int, int] = (0, 0)
    """Bytes of past connections."""

    @classmethod
    def of_nobody(cls, pid: int, uid: int, gid: int = 0) -> Program:
        """Return a program outside the registry, for a connection that has not joined yet."""
        return cls(new_id(), "", pid, 0, uid, gid)

    @property
    def subject(self) -> dict[str, object]:
        """Return the fields of log lines about the program."""
        return {"program": self.id if self.pid is None else self.pid, "user": self.uid}

    # ---- usage

    def add(self, connection: ProgramConnection) -> None:
        """Add a connection."""
        self.connections[connection] = None

    def remove(self, connection: ProgramConnection) -> None:
        """Forget a connection before it is closed, and count its bytes."""
        requests, replies = connection.num_bytes
        self._gone_bytes = self._gone_bytes[0] + requests, self._gone_bytes[1] + replies
        del self.connections[connection]
        self.alone_since_s = time.monotonic()

    def measure(self, page_seconds: float | None = None) -> Used:
        """Update and return the usage. `page_seconds`: the page-seconds, if the caller has computed them."""
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
        """Continue from the usage before the daemon's restart. The user's counters do not continue: they began at zero
        with this daemon.
        """
        self.used = used
        self.page_seconds = PageSeconds(used.page_seconds)
        self._gone_bytes = used.bytes_in, used.bytes_out

    # ---- limits

    def require(self, num_tokens: int, num_pages: int) -> None:
        """Check the limits for additional tokens and pages. OverLimit: a limit is exceeded, and the program ends."""
        if self.over is None and self.limits.is_any:
            self._look(num_tokens, num_pages)
        if self.over is not None:
            raise self.over_limit()

    @property
    def num_tokens_left(self) -> int | None:
        """Number of tokens that the program may still compute. None: the program has no limit on tokens."""
        return None if self.limits.tokens is None else max(0, self.limits.tokens - self.used.tokens - self.num_promised)

    def over_limit(self) -> OverLimit:
        """Return the error with which the program's calls fail from now on."""
        assert self.over is not None
        return OverLimit(self.over.text)

    def look(self) -> None:
        """Check the limits that may be exceeded without a call: by a loop in C, or as time passes."""
        if self.over is None and self.limits.is_any:
            self._look(0, 0)
            most = self.limits.page_seconds
            if self.over is None and most is not None and self.page_seconds.total() > most:
                self._exceed("page_seconds", f"it has had pages for more than {most:g} page-seconds")

    def _look(self, num_tokens: int, num_pages: int) -> None:
        limits, num_used = self.limits, self.used.tokens
        # Tokens in flight were granted to other calls. They alone are no reason to end the program.
        num_wanted = num_tokens and num_tokens + self.num_promised
        if limits.tokens is not None and num_used + num_wanted > limits.tokens:
            under_way = f", {self.num_promised} are under way" if self.num_promised else ""
            more = f"{under_way}, and it asks for {num_tokens} more" if num_tokens else ""
            self._exceed("tokens", f"it has computed {num_used} of its {limits.tokens} tokens{more}")
        elif limits.pages is not None and self.page_seconds.num_pages + num_pages > limits.pages:
            # `num_pages` counts a page once for each file. Count distinct pages before the verdict.
            num_had = self.page_seconds.num_distinct_pages()
            if num_had + num_pages > limits.pages:
                more = f", and asks for {num_pages} more" if num_pages else ""
                self._exceed("pages", f"it has {num_had} of its {limits.pages} pages{more}")

    def _exceed(self, what: str, why: str) -> None:
        self.over = Over(what, f"program {self.name} ({self.id}) is over its limit on {what}: {why}")
        if self.exceeded is not None:
            self.exceeded.add(self)

    # ---- facts for replies and lists

    @property
    def process(self) -> tuple[int, int, int] | None:
        """Pid, start time and uid of the first process. None: the process does not run yet."""
        return None if self.pid is None else (self.pid, self.start, self.uid)

    @property
    def num_handles(self) -> int:
        """Number of handles that the connections have open."""
        return sum(len(each.handles) for each in self.connections)

    @property
    def has_anybody(self) -> bool:
        """Whether a connection or a guest of the program may still use the model."""
        return bool(self.connections or self.num_guests)

    def facts(self) -> dict[str, Any]:
        """Return the facts that this object can give quickly."""
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
    """Return a random id of the kind that launchers make."""
    return os.urandom(MAX_ID // 2).hex()
