"""Programs that start others: spawn, wait, kill; and which there are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

from libsym.abi import Op
from libsym.arguments import int64, utf8
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid, ProtocolError
from libsym.faces import system_call
from libsym.info import parse, split_object
from libsym.usage import Usage


@dataclass(frozen=True, slots=True)
class Child:
    """A program that this one has started.

    >>> sym.Child("1f2e3d4c", "summary", 4242)
    Child(id='1f2e3d4c', name='summary', pid=4242)
    """

    id: str
    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.

    >>> sym.Ended(0, "exit").status
    0
    """

    status: int | None
    """0 to 255, as `symphony run` would return it; None: nobody knows."""
    reason: str
    """`exit`, `signal`, `killed`, `restart`, or the limit that it reached: `time`, `memory`, `tokens`, `pages`, …"""


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """A program as the daemon knows it.

    >>> length = sym.kv_write(sym.kv_create(), [1, 2, 3])
    >>> me = next(each for each in sym.programs() if each.pid == sym.getpid())
    >>> me.connections, me.state, me.usage.tokens >= 3
    (1, 'idle', True)
    """

    id: str
    name: str
    pid: int | None = None
    """Of its first process."""
    uid: int = 0
    parent: str | None = None
    """The id of the program that started it."""
    started: float = 0.0
    """In seconds since 1970."""
    connections: int = 0
    pages: int = 0
    """Of the files that it had open within the last second; files that share pages count them each."""
    state: str = "ended"
    """What it waits for: `computing`, `queued`, `waiting for room`, `waiting for a lock`, …, `idle`."""
    call: str | None = None
    """Which call that is."""
    usage: Usage = field(default_factory=Usage)
    limits: Mapping[str, float] = field(default_factory=dict)
    status: int | None = None
    """Of one that has ended."""
    reason: str | None = None
    ended: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What a newer daemon says beyond this."""

    @classmethod
    def from_json(cls, found: Any) -> Self:
        known, extra = split_object(cls, found)
        known["usage"] = Usage(**split_object(Usage, known.get("usage", {}))[0])
        return cls(**known, extra=extra)


Program: TypeAlias = Child | ProgramInfo | str
"""Or its id."""


@system_call
def spawn(
    program: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    name: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    detached: bool = False,
    limits: Mapping[str, float] | None = None,
    restart: Literal["no", "on-failure"] = "no",
) -> Script[Child]:
    """Start a program beside this one, as `symphony run PROGRAM ARGS` would; it runs when this returns.

    It ends with this program, however that ends, unless it is `detached`. `env` is added to what this program was
    started with; `cwd` is the directory of this program's start unless given. `limits` are `tokens`, `pages`,
    `page_seconds`, and those of `symphony run`: see symphony(1). `restart="on-failure"`: it is started again when it
    fails. Of a name that is in use the child gets another one: NAME-2, NAME-3.

    NotSupported: this program was not started by `symphony run`, so there is no launcher that could start another.

    >>> try:
    ...     child = sym.spawn("summary.py", ["--words", "100"], limits={"tokens": 10_000})
    ... except sym.NotSupported as error:
    ...     print(error)
    this program has no launcher, which spawn() needs: start it with `symphony run`
    """
    wanted = {
        "program": os.fspath(program),
        "args": [str(each) for each in args],
        "env": dict(env or {}),
        "cwd": None if cwd is None else os.fspath(cwd),
        "name": name,
        "detached": detached,
        "limits": dict(limits or {}),
        "restart": restart,
    }
    reply = yield Call(Op.SPAWN, payload=_payload(wanted))
    return Child(**_object(reply.payload, "id", "name", "pid"))


@system_call
def wait(program: Program) -> Script[Ended]:
    """Wait until a program has ended that this one has started; how it ended. It may be asked again afterwards.

    >>> try:
    ...     ended = sym.wait("1f2e3d4c")
    ... except sym.NotSupported as error:
    ...     print(error)
    this program has no launcher, which wait() needs: start it with `symphony run`
    """
    reply = yield Call(Op.WAIT, payload=_id_of(program))
    return Ended(**_object(reply.payload, "status", "reason"))


@system_call
def kill(program: Program, signal: int = 15) -> Script[None]:
    """Send a signal (SIGTERM) to all processes of a program that this one has started, or that one of those has.

    >>> try:
    ...     sym.kill("1f2e3d4c", 9)
    ... except sym.NotSupported as error:
    ...     print(error)
    this program has no launcher, which kill() needs: start it with `symphony run`
    """
    yield Call(Op.KILL, args=(int64(signal, "signal"), 0, 0, 0), payload=_id_of(program))


@system_call
def programs(*, ended: bool = False) -> Script[list[ProgramInfo]]:
    """The programs of this user, or of all users for root, in the order in which they began.

    `ended`: the last thousand that have ended, too.

    >>> length = sym.kv_write(sym.kv_create(), [1, 2, 3])
    >>> [each.connections for each in sym.programs() if each.pid == sym.getpid()]
    [1]
    """
    found: list[ProgramInfo] = []
    payload, after = _payload({"ended": ended}), 0
    while True:
        reply = yield Call(Op.PROGRAMS, args=(after, 0, 0, 0), payload=payload)
        found += [ProgramInfo.from_json(each) for each in parse(reply.payload)]
        after = reply.args[0]
        if not after:
            return found


def _payload(wanted: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps(wanted, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise Invalid(f"a program is started with texts and numbers: {error}") from None
    return utf8(text, "what a program is started with")


def _id_of(program: Program) -> bytes:
    return utf8(program if isinstance(program, str) else program.id, "the id of a program")


def _object(payload: bytes, *names: str) -> dict[str, Any]:
    found = parse(payload)
    if not isinstance(found, dict) or set(names) - found.keys():
        raise ProtocolError(f"the daemon's answer lacks one of {', '.join(names)}: use one release for both")
    return {name: found[name] for name in names}
