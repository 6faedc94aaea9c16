"""History: programs that have ended, with their logs. Up to a hundred programs are kept, for a day each."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from symphony.launcher.common.statuses import SIGNALLED
from symphony.launcher.machine import processes
from symphony.launcher.supervising.program import End, LaunchedProgram, Record

log = logging.getLogger(__name__)

MAX_ENDED = 100
MAX_AGE_S = 24 * 3600.0


class History:
    """Ended programs, including those of earlier launchers."""

    def __init__(self, directory: Path) -> None:
        self._ended: dict[str, LaunchedProgram] = {}
        for path in directory.iterdir():
            self._read(path)
        _bury(directory.parent, [each for each in self._ended.values() if each.record.end is None])
        ends = sorted(self._ended.values(), key=_ended_at)
        self._ended = {each.record.id: each for each in ends}
        self._trim()

    def _read(self, path: Path) -> None:
        try:
            record = Record.read(path / "state.json")
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s is no program's directory any more, and is removed: %s", path, error)
            shutil.rmtree(path)
            return
        self._ended[record.id] = LaunchedProgram(path, record, None)

    def add(self, program: LaunchedProgram) -> None:
        self._ended[program.record.id] = program
        self._trim()

    def latest_first(self) -> Iterator[LaunchedProgram]:
        return reversed(self._ended.values())

    def _trim(self) -> None:
        oldest = time.time() - MAX_AGE_S
        for program in list(self._ended.values()):
            if len(self._ended) <= MAX_ENDED and _ended_at(program) >= oldest:
                return
            del self._ended[program.record.id]
            program.forget()


def _ended_at(program: LaunchedProgram) -> float:
    assert program.record.end is not None
    return program.record.end.at


def _bury(launcher: Path, programs: list[LaunchedProgram]) -> None:
    """Record the end of programs whose launcher was killed, and kill the processes that they left."""
    if not programs:
        return
    ours = processes.children(os.getpid())
    for pid in set(processes.left_by(str(launcher), [each.record.id for each in programs])).difference(ours):
        processes.send_signal(pid, signal.SIGKILL)
    for program in programs:
        program.record.end = End(SIGNALLED + signal.SIGKILL, "signal", time.time())
        program.over.set()
        program.socket_path.unlink(missing_ok=True)
        program.save()
