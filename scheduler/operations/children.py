"""PROGRAMS, SPAWN, WAIT and KILL: requests of a program about other programs.

The daemon starts and ends no process. The daemon passes SPAWN, WAIT and KILL to the launcher of the calling program,
and passes the launcher's answer back. The answer may take as long as a program lives. A coroutine waits for it, and
CANCEL ends the coroutine.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Coroutine
from typing import Any

import trio

from libsym.abi import Op
from libsym.errors import Invalid, NotPermitted, NotSupported, SymError
from scheduler.connection.lip import MAX_LATER, MAX_WAITS
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.operations.program_facts import ProgramFacts
from scheduler.programs.limits import ProgramLimits
from scheduler.programs.link import Link, Message
from scheduler.programs.program import MAX_ID, Program
from scheduler.programs.registry import Programs
from scheduler.wire.payloads import json_of
from scheduler.wire.replies import Reply, json_reply

log = logging.getLogger(__name__)

MAX_TEXTS = 4096
"""Maximum number of texts in a SPAWN: arguments, names and values of variables. All fit one message to the launcher."""
PAGE_BYTES = 500_000
"""Maximum number of bytes of a listing in one reply: some 600 programs."""
MAX_NAME = 64
_A_TURN = 30
_ID = re.compile(rf"[0-9a-f]{{{MAX_ID}}}")
_RESTARTS = ("no", "on-failure")
_ELSEWHERE = ("on", "source")
"""Fields of a SPAWN on another machine: the machine's name, and the text of the program's file if it does not ship."""
_SIGKILL, _MAX_SIGNAL = 9, 64


class Children:
    """Answers PROGRAMS, SPAWN, WAIT and KILL."""

    def __init__(self, programs: Programs, facts: ProgramFacts) -> None:
        self._programs = programs
        self._facts = facts

    def table(self) -> Table:
        return {
            Op.PROGRAMS: Operation(self._list, max_waiting=MAX_LATER),
            Op.SPAWN: Operation(self._spawn, max_waiting=MAX_LATER),
            Op.WAIT: Operation(self._wait, max_waiting=MAX_WAITS),
            Op.KILL: Operation(self._kill, max_waiting=MAX_LATER),
        }

    # ---- lists

    def _list(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """List programs in the order of their start.

        args[0] is 0 for the first request. A later request gives the first argument of the last reply: the start time,
        in nanoseconds, of the last program that the caller has.
        """
        wanted = _object(call, max_texts=4, max_other_bytes=64)
        ended = wanted.pop("ended", False)
        if not isinstance(ended, bool) or wanted:
            raise Invalid('PROGRAMS takes {"ended": true}, or false')
        return self._page(call, call.request.args[0], ended=ended)

    async def _page(self, call: SystemCall, after_ns: int, *, ended: bool) -> Reply:
        lip = call.lip
        found = self._programs.visible_to(lip.uid)
        if ended:
            found = sorted([*found, *self._programs.ended_of(lip.uid)], key=lambda each: each.began_ns)
        if lip.credentials.root is not None:  # a gateway's connection: its domains must not see each other
            found = [lip.program]
        states, rows, num_bytes = self._facts.states(), list[str](), 0
        for index, program in enumerate(each for each in found if each.began_ns > after_ns):
            if index % _A_TURN == _A_TURN - 1:
                await trio.lowlevel.checkpoint()
            row = json_reply(self._facts.of(program, states)).payload.decode()
            num_bytes += len(row)
            if rows and num_bytes > PAGE_BYTES:
                break
            rows.append(row)
            after_ns = program.began_ns
        else:
            after_ns = 0
        return Reply((after_ns,), f"[{','.join(rows)}]".encode())

    # ---- requests to the launcher

    def _spawn(self, call: SystemCall) -> Coroutine[Any, Any, Reply | None]:
        program, link = _launched(call)
        wanted = _object(call, max_texts=MAX_TEXTS, max_other_bytes=16 * MAX_TEXTS)
        return self._spawned(call, program, link, {"do": "spawn", "by": program.id, **_checked_spawn(wanted)})

    async def _spawned(self, call: SystemCall, program: Program, link: Link, message: Message) -> Reply | None:
        def kill(child: Message) -> None:
            """Kill a child that was started for a cancelled SPAWN."""
            try:
                link.demand({"do": "kill", "by": program.id, "id": child.get("id"), "signal": _SIGKILL})
            except SymError as error:
                log.warning("program %s, which nobody waits for any more, can't be ended: %s", child.get("id"), error)

        answer = await link.ask(message, late=kill)
        if call.is_cancelled:
            kill(answer)
            raise SymError("spawn() was cancelled", errno.ECANCELED)
        return json_reply({name: answer.get(name) for name in ("id", "name", "pid")})

    def _wait(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        program, link = _launched(call)
        number = _id_in(call)
        return self._waited(program, link, number)

    async def _waited(self, program: Program, link: Link, number: str) -> Reply:
        message = {"do": "wait", "by": program.id, "id": number}
        answer = await link.ask(message, same=("wait", program.id, number))
        return json_reply({name: answer.get(name) for name in ("status", "reason")})

    def _kill(self, call: SystemCall) -> Coroutine[Any, Any, Reply]:
        """Send the signal args[0] to a program."""
        program, link = _launched(call)
        number, signal = _id_in(call), call.request.args[0]
        if not 0 <= signal <= _MAX_SIGNAL:
            raise Invalid(f"there is no signal {signal}: 1 to {_MAX_SIGNAL}, or 0 to look for the program")
        return self._killed(link, {"do": "kill", "by": program.id, "id": number, "signal": signal})

    async def _killed(self, link: Link, message: Message) -> Reply:
        await link.ask(message)
        return Reply()


def _launched(call: SystemCall) -> tuple[Program, Link]:
    """Return the calling program and its launcher. SymError: the program has no launcher, or the launcher has gone."""
    lip, name = call.lip, call.request.op.name.lower()
    if lip.credentials.root is not None:
        raise NotPermitted(f"{name}() is not for a connection that is confined to a domain")
    program = lip.program
    if not program.is_launched:
        raise NotSupported(f"this program has no launcher, which {name}() needs: start it with `symphony run`")
    if program.link is None:
        raise SymError(
            f"the launcher of this program has gone, and {name}() needs it: try again later", errno.EHOSTDOWN
        )
    return program, program.link


def _object(call: SystemCall, *, max_texts: int, max_other_bytes: int) -> dict[str, Any]:
    request = call.request
    found = json_of(request, request.payload, max_texts=max_texts, max_other_bytes=max_other_bytes)
    if not isinstance(found, dict):
        raise Invalid(f"{request.op.name} takes a JSON object")
    return found


def _id_in(call: SystemCall) -> str:
    number = call.request.payload.decode("ascii", "replace")
    if not _ID.fullmatch(number):
        raise Invalid(f"{number[:60]!r} is no program: its id has {MAX_ID} hexadecimal digits")
    return number


def _checked_spawn(wanted: dict[str, Any]) -> Message:
    """Return the message for the launcher, with every field in the right type. Invalid: a field is wrong."""
    unknown = wanted.keys() - {"program", "args", "env", "cwd", "name", "detached", "limits", "restart", *_ELSEWHERE}
    if unknown:
        raise Invalid(f"SPAWN knows no {min(unknown)[:60]!r}")
    program, cwd, name = wanted.get("program"), wanted.get("cwd"), wanted.get("name")
    args, env, limits = wanted.get("args", []), wanted.get("env", {}), wanted.get("limits") or {}
    detached, restart = wanted.get("detached", False), wanted.get("restart", "no")
    if not _is_text(program) or not program:
        raise Invalid("spawn() needs the program: the path of a Python file, or the name of one that is shipped")
    if not isinstance(args, list) or not all(map(_is_text, args)):
        raise Invalid("the arguments of spawn() are a list of texts without NUL")
    if not isinstance(env, dict) or not all(_is_text(each) and "=" not in key for key, each in env.items()):
        raise Invalid("the environment of spawn() is names and texts, without NUL, names without =")
    if not all(each is None or (_is_text(each) and each) for each in (cwd, name)) or (name and len(name) > MAX_NAME):
        raise Invalid(f"the directory and the name for spawn() are texts, a name of at most {MAX_NAME} characters")
    if not isinstance(detached, bool) or restart not in _RESTARTS:
        raise Invalid('spawn() takes detached=True or False, and restart="no" or "on-failure"')
    elsewhere = {name: wanted[name] for name in _ELSEWHERE if name in wanted}
    if not all(_is_text(each) and each for each in elsewhere.values()) or [*elsewhere] == ["source"]:
        raise Invalid("the machine and the source for spawn() are texts, a source with a machine")
    return {
        **elsewhere,
        "program": program,
        "args": args,
        "env": env,
        "cwd": cwd,
        "name": name,
        "detached": detached,
        "limits": _checked_limits(limits),
        "restart": restart,
    }


def _checked_limits(limits: Any) -> dict[str, Any]:
    """Return checked limits. For limits that the launcher enforces, check only that they are numbers."""
    if not isinstance(limits, dict) or len(limits) > 16 or any(len(name) > 32 for name in limits):
        raise Invalid("limits are names and numbers")
    own = {name: value for name, value in limits.items() if name in ("tokens", "page_seconds", "pages")}
    others = {name: value for name, value in limits.items() if name not in own and value is not None}
    for name, value in others.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise Invalid(f"the limit on {name} is {str(value)[:60]}: a number is needed")
    return ProgramLimits.read(own).facts() | others


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value
