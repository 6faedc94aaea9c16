"""Calls on other programs: spawn, wait, kill, and a list of all programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias

from libsym.abi import FLEET_BEGIN, Op
from libsym.arguments import int64, path_text, utf8
from libsym.calls.faces import system_call
from libsym.calls.info import parse, split_object
from libsym.calls.usage import Usage
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid, ProtocolError


@dataclass(frozen=True, slots=True)
class Child:
    """A program that this program has started.

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
    """Exit status from 0 to 255, the same that `symphony run` returns. None: unknown."""
    reason: str
    """`exit`, `signal`, `killed`, `restart`, or the limit that the program reached: `time`, `memory`, `tokens`, …"""


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """Facts about a program, as `programs` lists them.

    >>> length = sym.kv_write(sym.kv_create(), [1, 2, 3])
    >>> me = next(each for each in sym.programs() if each.pid == sym.getpid())
    >>> me.connections, me.state, me.usage.tokens >= 3
    (1, 'idle', True)
    """

    id: str
    name: str
    pid: int | None = None
    """Pid of the program's first process."""
    uid: int = 0
    parent: str | None = None
    """Id of the program that started this program."""
    started: float = 0.0
    """When the program began, in seconds since 1970."""
    connections: int = 0
    pages: int = 0
    """Number of pages of the files that the program had open within the last second. A page in two files counts twice.
    """
    state: str = "ended"
    """Present activity of the program: `computing`, `queued`, `waiting for room`, `waiting for a lock`, …, `idle`."""
    call: str | None = None
    """Name of the call whose activity `state` describes."""
    usage: Usage = field(default_factory=Usage)
    limits: Mapping[str, float] = field(default_factory=dict)
    status: int | None = None
    """Exit status of a program that has ended."""
    reason: str | None = None
    ended: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further facts, from a daemon that is newer than this library."""

    @classmethod
    def from_json(cls, found: Any) -> Self:
        known, extra = split_object(cls, found)
        known["usage"] = Usage(**split_object(Usage, known.get("usage", {}))[0])
        return cls(**known, extra=extra)


class HasPath(Protocol):
    """A `Kv`: an open file with a name."""

    @property
    def path(self) -> str | None: ...


Near: TypeAlias = str | os.PathLike[str] | HasPath
MAX_SOURCE_BYTES = 32 << 10
"""Maximum size of a program's file that spawn() sends to another machine."""


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
    fleet: bool = False,
    near: Near | Sequence[Near] = (),
) -> Script[Child]:
    """Start a child program, as `symphony run PROGRAM ARGS` does; return when it runs.

    The child ends when this program ends, unless it is `detached`. `env` is added to the environment in which this
    program was started. The default of `cwd` is the directory in which this program was started. `limits` are `tokens`,
    `pages`, `page_seconds`, and those of `symphony run`: see symphony(1). With `restart="on-failure"` the launcher
    restarts the child when it fails. If `name` is in use, the child is called NAME-2, NAME-3 and so on.

    `fleet`: the child runs on the machine of the fleet that `fleet_place(*near)` names, with the program's file, of at
    most 32 KiB, and no other file. `near` is a `Kv` with a name, or a path, or several. If that is another machine, the
    returned child is a process here that ends with the program there, passes signals on to it, and has
    its output.

    NotSupported: `symphony run` did not start this program, so it has no launcher.

    >>> try:
    ...     child = sym.spawn("summary.py", ["--words", "100"], limits={"tokens": 10_000})
    ... except sym.NotSupported as error:
    ...     print(error)
    this program has no launcher, which spawn() needs: start it with `symphony run`
    """
    near_paths = _near_paths(near)
    elsewhere: dict[str, str] = {}
    if fleet:
        if cwd is not None:
            raise Invalid("spawn(fleet=True) takes no cwd: another machine has other directories")
        elsewhere = yield from _elsewhere(os.fspath(program), near_paths)
    elif near_paths:
        raise Invalid("near chooses the machine for spawn(fleet=True)")
    wanted = {
        **elsewhere,
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


def _near_paths(near: Near | Sequence[Near]) -> list[str]:
    """Return the paths of files. Invalid: a file has no name."""
    several = near if isinstance(near, Sequence) and not isinstance(near, str) else [near]
    return [path_text(each if isinstance(each, str | os.PathLike) else each.path or "") for each in several]


def _elsewhere(program: str, near: list[str]) -> Script[dict[str, str]]:
    """Return the machine for a program, and the program's source, for SPAWN. An empty dict: this machine is the best.

    A program that is no file here is one that ships with Symphony.
    """
    reply = yield Call(Op.FLEET_PLACE, flags=FLEET_BEGIN, payload=json.dumps(near).encode())
    found = parse(reply.payload)
    if found["machine"] == found["here"]:
        return {}
    file = Path(program)
    if not file.is_file():
        return {"on": found["machine"]}
    source = file.read_bytes()
    if file.suffix != ".py" or len(source) > MAX_SOURCE_BYTES:
        raise Invalid(f"{program}: another machine gets a Python file (.py) of at most {MAX_SOURCE_BYTES:,} bytes")
    try:
        return {"on": found["machine"], "source": source.decode()}
    except UnicodeDecodeError:
        raise Invalid(f"{program} is not UTF-8") from None


@system_call
def wait(program: Child | ProgramInfo | str) -> Script[Ended]:
    """Wait until a child of this program ends; return how it ended. Later calls return the same result.

    >>> try:
    ...     ended = sym.wait("1f2e3d4c")
    ... except sym.NotSupported as error:
    ...     print(error)
    this program has no launcher, which wait() needs: start it with `symphony run`
    """
    reply = yield Call(Op.WAIT, payload=_id_of(program))
    return Ended(**_object(reply.payload, "status", "reason"))


@system_call
def kill(program: Child | ProgramInfo | str, signal: int = 15) -> Script[None]:
    """Send a signal (SIGTERM by default) to all processes of a child of this program, or of a descendant.

    >>> try:
    ...     sym.kill("1f2e3d4c", 9)
    ... except sym.NotSupported as error:
    ...     print(error)
    this program has no launcher, which kill() needs: start it with `symphony run`
    """
    yield Call(Op.KILL, args=(int64(signal, "signal"), 0, 0, 0), payload=_id_of(program))


@system_call
def programs(*, ended: bool = False) -> Script[list[ProgramInfo]]:
    """List the programs of this user in the order in which they began. Root gets the programs of all users.

    `ended`: list the last thousand programs that have ended, too.

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


def _id_of(program: Child | ProgramInfo | str) -> bytes:
    return utf8(program if isinstance(program, str) else program.id, "the id of a program")


def _object(payload: bytes, *names: str) -> dict[str, Any]:
    found = parse(payload)
    if not isinstance(found, dict) or set(names) - found.keys():
        raise ProtocolError(f"the daemon's answer lacks one of {', '.join(names)}: use one release for both")
    return {name: found[name] for name in names}
