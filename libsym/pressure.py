"""The daemon says that room runs short, before it takes some: a program decides by itself what goes."""

from __future__ import annotations

from dataclasses import dataclass, field

from libsym.abi import Op, PressureKind
from libsym.arguments import wait_ms
from libsym.channel.scripts import Call, Script
from libsym.errors import ProtocolError
from libsym.faces import system_call
from libsym.info import parse, split_object


@dataclass(frozen=True, slots=True)
class Candidate:
    """A KV file that may go, as `kv_pressure` names it.

    >>> file = sym.Candidate(path="old.kv", memory_bytes=1 << 20, freed_bytes=1 << 19, idle_s=90.0, bring_s=0.002)
    >>> f"{file.path}: {file.freed_bytes >> 10} KiB, unused for {file.idle_s:.0f} s"
    'old.kv: 512 KiB, unused for 90 s'
    """

    path: str | None = None
    """From the root of the mount, or of the domain that the connection is confined to; None: it has no name."""
    handles: tuple[int, ...] = ()
    """By which this connection has it open: it is the file of a KV whose `handle` is among them."""
    ino: int = 0
    tokens: int = 0
    memory_bytes: int = 0
    """Of its pages in memory, those that other files share, too."""
    freed_bytes: int = 0
    """What would be free if it were gone: pages that no other file shares. Of a quota: wherever they are."""
    idle_s: float = 0.0
    """Seconds since its last use."""
    bring_s: float = 0.0
    """Seconds that bringing it back from disk would take."""
    priority: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Pressure:
    """Room runs short for the files of this program's user, or of its domain.

    >>> pressure = sym.Pressure("memory", wanted_bytes=1 << 20, grace_s=0.1)
    >>> pressure.kind, pressure.candidates
    ('memory', ())
    """

    kind: str
    """memory: the daemon is about to move pages of these files to disk. quota: an account is nearly full."""
    wanted_bytes: int
    """So much is wanted: of memory by whoever needs it, of a quota to be below nine tenths of it."""
    grace_s: float
    """Seconds that are left before the daemon goes on by itself. Of a quota 0: it takes nothing."""
    candidates: tuple[Candidate, ...] = field(default=())
    """What the daemon would take, first what it would take first; of a quota, what was not used for longest."""


@system_call
def kv_pressure(*, timeout: float | None = None) -> Script[Pressure]:
    """Waits until room runs short for files of this user, or of the domain of this connection, and says which may go.

    The daemon tells of it before it moves pages of theirs to disk, and waits for a grace (`--grace-ms`). Within that a
    program may make room as it sees fit: by `kv_remove`, `kv_truncate`, or advice of COLD on what it needs least; it
    may shrink a file by `kv_extract`. What is still needed then the daemon takes by itself, and nothing is lost.
    It tells as well when nine tenths of a quota are used, and again with each further hundredth.

    Only files of the caller's own user are named, in its domain if it is confined to one. Each connection is told once
    of each event, by every call that waits; one that comes while the grace runs is told at once. An account that has
    let a grace go by has none for the next seconds. After `timeout` seconds it is WouldBlock; 0 does not wait.

    >>> try:
    ...     for file in sym.kv_pressure(timeout=0).candidates:
    ...         if file.path is not None and file.idle_s > 60:
    ...             sym.kv_advise(file.path, sym.COLD)
    ... except sym.WouldBlock:
    ...     print("there is room")
    there is room
    """
    reply = yield Call(Op.KV_PRESSURE, args=(wait_ms(timeout), 0, 0, 0))
    reply.claim()  # until here, whatever ends the call has the next one told
    kind, wanted_bytes, grace_ms, _ = reply.args
    files = [split_object(Candidate, file)[0] for file in parse(reply.payload)]
    found = tuple(Candidate(**(file | {"handles": tuple(file.get("handles", ()))})) for file in files)
    return Pressure(_kind(kind), wanted_bytes, grace_ms / 1000, found)


def _kind(kind: int) -> str:
    try:
        return PressureKind(kind).name.lower()
    except ValueError:
        raise ProtocolError(f"the daemon tells of a pressure of kind {kind}: use one release for both") from None
