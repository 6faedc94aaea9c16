"""Programs that have ended: the last hundred, of the last day, with their logs."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from symphony.launcher import processes
from symphony.launcher.program import End, Program, Record
from symphony.launcher.statuses import SIGNALLED

log = logging.getLogger(__name__)

MAX_ENDED = 100
MAX_AGE_S = 24 * 3600.0


class History:
    """Those of launchers before this one, too."""

    def __init__(self, directory: Path) -> None:
        self._ended: dict[str, Program] = {}
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
        self._ended[record.id] = Program(path, record, None)

    def add(self, program: Program) -> None:
        self._ended[program.record.id] = program
        self._trim()

    def latest_first(self) -> Iterator[Program]:
        return reversed(self._ended.values())

    def _trim(self) -> None:
        oldest = time.time() - MAX_AGE_S
        for program in list(self._ended.values()):
            if len(self._ended) <= MAX_ENDED and _ended_at(program) >= oldest:
                return
            del self._ended[program.record.id]
            program.forget()


def _ended_at(program: Program) -> float:
    assert program.record.end is not None
    return program.record.end.at


def _bury(launcher: Path, programs: list[Program]) -> None:
    """Their launcher was killed, and they with it; what they may have left behind is ended now."""
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
