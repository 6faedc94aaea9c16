"""Notes the lines that a test runs, in all of its processes: pytest's plugin, and the first module of every Python.

The file `now` has the number of the test that runs, and pytest's process. A process adds a row to `lines` when a test
first reaches a line of Python in it; seen.c adds rows to `blocks` for C. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOW = struct.Struct("II")


class Tracer:
    """Tracer of one process. Files are opened late: confined processes run none of these lines."""

    def __init__(self, place: Path, files: frozenset[str]) -> None:
        self.place, self._files = place, files
        self._seen = set[tuple[bool, int, str, int]]()
        self._read: Callable[[], tuple[int, int]] | None = None

    def call(self, frame: Any, _event: str, _arg: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: Any, event: str, _arg: object) -> Any:
        if event == "line":
            if self._read is None:
                self._read = self._open()
            test, process = self._read()
            line = (process == os.getpid(), test, frame.f_code.co_filename, frame.f_lineno)
            if line not in self._seen:
                self._seen.add(line)
                with (self.place / "lines").open("a") as file:
                    file.write("{:d} {} {} {}\n".format(*line))
        return self._line

    def _open(self) -> Callable[[], tuple[int, int]]:
        import mmap

        with (self.place / "now").open("rb") as file:
            memory = mmap.mmap(file.fileno(), NOW.size, access=mmap.ACCESS_READ)
        return lambda: NOW.unpack_from(memory)


class Plugin:
    """Writes to `now` which test runs, and adds a row to `tests` when a test has passed."""

    def __init__(self, place: Path) -> None:
        self._place, self._number, self._seconds, self._passed = place, 0, 0.0, True
        self._say()

    def _say(self) -> None:
        with (self._place / "now").open("r+b") as file:  # in place: others have it mapped
            file.write(NOW.pack(self._number, os.getpid()))

    def pytest_runtest_logstart(self) -> None:
        self._number, self._seconds, self._passed = self._number + 1, 0.0, True
        self._say()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds, self._passed = self._seconds + report.duration, self._passed and report.passed
        if report.when == "teardown" and self._passed:
            with (self._place / "tests").open("a") as file:
                file.write(json.dumps([self._number, report.nodeid, round(self._seconds, 3)]) + "\n")


def begin(place: str, files: list[str]) -> None:
    """Trace this process: a `.pth` file calls this before all other code."""
    global tracer  # noqa: PLW0603 - one for the process
    tracer = Tracer(Path(place), frozenset(files))
    threading.settrace(tracer.call)
    sys.settrace(tracer.call)


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Plugin(tracer.place))


tracer: Tracer
