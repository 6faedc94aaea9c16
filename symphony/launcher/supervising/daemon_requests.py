"""The daemon's requests to a launcher: spawn, wait and kill on behalf of programs, and limit, which ends a program."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import secrets
import shutil
import signal
from pathlib import Path
from typing import Any

from symphony.launcher.common.finding import find_program, shipped
from symphony.launcher.common.places import MAX_ERROR, Refused
from symphony.launcher.common.spec import NONE, checked
from symphony.launcher.common.statuses import LOST, SIGNALLED
from symphony.launcher.supervising.daemon_link import Message
from symphony.launcher.supervising.ending import LAST_WORDS_S
from symphony.launcher.supervising.program import LaunchedProgram
from symphony.launcher.supervising.stand_in import killer, stand_in
from symphony.launcher.supervising.supervisor import Supervisor

log = logging.getLogger(__name__)


class _NotAllowed(Refused):
    errno = errno.EPERM


class _NoProgram(Refused):
    errno = errno.ESRCH


class _TooMany(Refused):
    errno = errno.EDQUOT


MAX_STAND_INS = 32
"""Maximum number of a user's programs on other machines that programs have spawned. Each has a process here, which no
limit of its parent bounds.
"""


class DaemonRequests:
    """Concurrent server of the daemon's requests."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._link = supervisor.link

    def begin(self, request: Message) -> None:
        if request["do"] == "limit":
            program = self._supervisor.living.get(request["id"])
            if program is not None:
                self._supervisor.ran_into(program, request["what"], LAST_WORDS_S)
        else:
            self._supervisor.spawn(self._serve(request))

    async def _serve(self, request: Message) -> None:
        try:
            words = await self._do(request)
        except Refused as error:
            text, code = str(error), getattr(error, "errno", _ERRNOS.get(error.status, 0))
            self._link.answer(request, error=text[:MAX_ERROR], errno=code)
        else:
            self._link.answer(request, ok=True, **words)

    async def _do(self, request: Message) -> dict[str, Any]:
        match request["do"]:
            case "spawn":
                return await self._start(request)
            case "kill":
                self._kill(request)
                return {}
            case "wait":
                return await self._wait(request)
        raise Refused(f"a launcher does not know {request['do']!r}")

    async def _start(self, request: Message) -> dict[str, Any]:
        parent = self._living(request["by"])
        if "on" in request:
            return await self._start_elsewhere(parent, request)
        directory = os.path.join(parent.spec.cwd, request.get("cwd") or "")  # noqa: PTH118 - text is needed
        spec = checked(
            {
                **_program(parent, request["program"], directory),
                "isolation": parent.spec.isolation,
                "shows": parent.spec.shows,
                "home": parent.spec.home,
                "empty": parent.spec.empty,
                "allow_net": parent.spec.allow_net,
                "venv": parent.spec.venv,
                "args": request.get("args") or [],
                "env": {**parent.spec.env, **(request.get("env") or {})},
                "cwd": directory,
                "name": request.get("name"),
                "limits": request.get("limits"),
                "restart": request.get("restart"),
                "umask": parent.spec.umask,
                "rlimits": parent.spec.rlimits,
                "has_input": False,
            }
        )
        spec = dataclasses.replace(spec, limits=spec.limits.within(parent.spec.limits))
        return _shown(await self._supervisor.start(spec, parent=parent.record.id, outlives=_outlives(request)))

    async def _start_elsewhere(self, parent: LaunchedProgram, request: Message) -> dict[str, Any]:
        """Start the stand-in of a program on another machine. The program's file is kept until the stand-in ends,
        where no sandbox shows it: a parent that replaced the file would choose what the stand-in reads.
        """
        if sum(each.spec.stands_for is not None for each in self._supervisor.living.values()) >= MAX_STAND_INS:
            raise _TooMany(f"{MAX_STAND_INS} programs run on other machines: more can't be spawned there")
        try:
            directory = self._supervisor.new_directory_of_sent()
        except OSError as error:
            raise Refused(f"no directory for the program's text: {error.strerror}") from None
        try:
            spec = stand_in(parent.spec, request, directory, secrets.token_hex(4))
            program = await self._supervisor.start(spec, parent=parent.record.id, outlives=_outlives(request))
        except BaseException:
            shutil.rmtree(directory)
            raise
        self._supervisor.spawn(self._clear_up_after(program, directory))
        return _shown(program)

    async def _clear_up_after(self, program: LaunchedProgram, directory: Path) -> None:
        """Remove the directory of a stand-in that has ended. If it was killed, or lost its program, end the program."""
        await program.over.wait()
        shutil.rmtree(directory)
        end = program.record.end
        assert end is not None
        if end.status == LOST or (end.reason != "exit" and end.status not in _BEFORE_BEGIN):
            try:
                await self._supervisor.start(killer(program.spec))
            except Refused as error:
                log.warning("the program %s on another machine runs on: %s", program.spec.stands_for, error)

    def _kill(self, request: Message) -> None:
        program = self._living(request["id"])
        by = request.get("by")
        if by is not None and by not in self._ancestors(program):
            raise _NotAllowed(f"{program.record.name} is no program that the caller started")
        self._supervisor.kill(program, int(request["signal"]))

    async def _wait(self, request: Message) -> dict[str, Any]:
        program = self._known(request["id"])
        await program.over.wait()
        end = program.record.end
        assert end is not None
        return {"status": end.status, "reason": end.reason}

    def _living(self, name: str) -> LaunchedProgram:
        found = self._supervisor.living.get(name)
        if found is None:
            raise _NoProgram(f"no program {name} is running")
        return found

    def _known(self, name: str) -> LaunchedProgram:
        try:
            return self._supervisor.find(name)
        except Refused as error:
            raise _NoProgram(str(error)) from None

    def _ancestors(self, program: LaunchedProgram) -> set[str]:
        """Return the ids of a program's parent and further ancestors.
        The chain ends at an ancestor that has ended: its own ancestors may not signal this program.
        """
        found = set[str]()
        parent = program.record.parent
        while parent is not None and parent not in found:
            found.add(parent)
            above = self._supervisor.living.get(parent)
            parent = above.record.parent if above is not None else None
        return found


def _outlives(request: Message) -> bool:
    return bool(request.get("detached"))


def _shown(program: LaunchedProgram) -> dict[str, Any]:
    return {"id": program.record.id, "name": program.record.name, "pid": program.record.pid}


def _program(parent: LaunchedProgram, word: str, directory: str) -> Message:
    """Return the path and the kind of the program that `parent` asks for by `word`.
    For a sandboxed parent, a path stays unresolved, since it is valid only inside the sandbox.
    """
    if parent.spec.isolation == NONE:
        path, python = find_program(word, directory)
        return {"path": path, "python": python}
    ships = shipped().get(word)
    return {"path": word, "python": word.endswith(".py"), "ships": None if ships is None else str(ships)}


_BEFORE_BEGIN = {SIGNALLED + each for each in (*range(1, 4), signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
"""Exit statuses of stand-ins that have started no program: when the program begins, it gets these signals."""
_ERRNOS = {126: errno.EACCES, 127: errno.ENOENT, 125: errno.EINVAL}
"""Errno for each status with which `symphony run` would end."""
