"""Pressure: the daemon warns programs that memory or a quota runs short, so that they can choose what to free."""

from __future__ import annotations

from dataclasses import dataclass, field

from libsym.abi import Op, PressureKind
from libsym.arguments import wait_ms
from libsym.calls.faces import system_call
from libsym.calls.info import parse, split_object
from libsym.channel.scripts import Call, Script
from libsym.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A KV file that a program could free, as `kv_pressure` names it.

    >>> file = sym.Candidate(path="old.kv", memory_bytes=1 << 20, freed_bytes=1 << 19, idle_s=90.0, bring_s=0.002)
    >>> f"{file.path}: {file.freed_bytes >> 10} KiB, unused for {file.idle_s:.0f} s"
    'old.kv: 512 KiB, unused for 90 s'
    """

    path: str | None = None
    """The path from the root of the mount, or of the connection's domain. None: the file is anonymous."""
    handles: tuple[int, ...] = ()
    """Handles by which this connection has the file open: the `handle` of each KV."""
    ino: int = 0
    tokens: int = 0
    memory_bytes: int = 0
    """Bytes of the file's pages in memory, including shared pages."""
    freed_bytes: int = 0
    """Bytes that removing the file would free: pages that no other file shares. For a quota, also pages on disk."""
    idle_s: float = 0.0
    """Seconds since the last use of the file."""
    bring_s: float = 0.0
    """Seconds that it would take to bring the file back from disk."""
    priority: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Pressure:
    """A warning that memory or a quota runs short for the files of this program's user, or of its domain.

    >>> pressure = sym.Pressure("memory", wanted_bytes=1 << 20, grace_s=0.1)
    >>> pressure.kind, pressure.candidates
    ('memory', ())
    """

    kind: str
    """`memory`: the daemon is about to move pages of these files to disk. `quota`: a quota is nearly used up."""
    wanted_bytes: int
    """Bytes to free: the memory that other calls need, or the bytes above nine tenths of the quota."""
    grace_s: float
    """Seconds until the daemon moves pages by itself. For a quota: 0, since the daemon moves no pages."""
    candidates: tuple[Candidate, ...] = field(default=())
    """Files to free, in the order in which the daemon would evict them. For a quota, the least recently used file is
    first.
    """


@system_call
def kv_pressure(*, timeout: float | None = None) -> Script[Pressure]:
    """Wait until memory or a quota runs short for files of this user, or of the domain; return the files to free.

    The daemon warns programs before it moves pages of their files to disk, and waits for a grace (`--grace-ms`). Within
    the grace a program may free memory in its own way: `kv_remove`, `kv_truncate` or `kv_extract`, or advice of COLD on
    the files that it needs least. After the grace the daemon moves pages to disk until there is enough memory. No data
    are lost. The daemon also warns when nine tenths of a quota are used, and again for each further hundredth.

    The warning names only files of the caller's user, in the domain if the connection is confined to a domain. Each
    connection gets one warning for each event, and all calls of the connection that wait at that time return it. A call
    that begins during the grace returns immediately. If an account lets a grace pass unused, it has no grace for the
    next seconds. WouldBlock: no warning arrived within `timeout` seconds. `timeout=0` does not wait.

    >>> try:
    ...     for file in sym.kv_pressure(timeout=0).candidates:
    ...         if file.path is not None and file.idle_s > 60:
    ...             sym.kv_advise(file.path, sym.COLD)
    ... except sym.WouldBlock:
    ...     print("there is room")
    there is room
    """
    reply = yield Call(Op.KV_PRESSURE, args=(wait_ms(timeout), 0, 0, 0))
    reply.claim()  # if the call ends before this line, the next call gets the warning
    kind, wanted_bytes, grace_ms, _ = reply.args
    files = [split_object(Candidate, file)[0] for file in parse(reply.payload)]
    found = tuple(Candidate(**(file | {"handles": tuple(file.get("handles", ()))})) for file in files)
    return Pressure(_kind(kind), wanted_bytes, grace_ms / 1000, found)


def _kind(kind: int) -> str:
    try:
        return PressureKind(kind).name.lower()
    except ValueError:
        raise ProtocolError(f"the daemon tells of a pressure of kind {kind}: use one release for both") from None
