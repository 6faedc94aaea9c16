"""Recorder of the lines that a test runs in all its processes: a pytest plugin, and a module of every Python.

The file `now` has the number of the running test and pytest's pid. A process adds a row to `lines` when a test first
reaches a Python line in that process; seen.c adds rows to `blocks` for C. PYTEST_DONT_REWRITE
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
MAX_CALLS = 100
"""Number of calls of a function, in a test, whose lines are recorded. Recording all calls would take five times as
long.
"""


class Tracer:
    """Tracer of one process. The tracer opens its files when the process runs a line that is to be recorded. Confined
    processes, which may open no files, run no such line.
    """

    def __init__(self, place: Path, files: frozenset[str]) -> None:
        self.place, self._files = place, files
        self._seen = set[tuple[bool, int, str, int]]()
        self._read: Callable[[], tuple[int, int]] | None = None
        self._test = -1
        self._calls = dict[Any, int]()
        """Number of calls of each function in the test, by the function's code object."""

    def call(self, frame: Any, _event: str, _arg: object) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        calls = self._calls[code] = self._calls.get(code, 0) + 1
        return self._line if calls <= MAX_CALLS or self._test != self._now()[0] else None

    def _now(self) -> tuple[int, int]:
        if self._read is None:
            self._read = self._open()
        return self._read()

    def _line(self, frame: Any, event: str, _arg: object) -> Any:
        if event == "line":
            test, process = self._now()
            if test != self._test:
                self._test = test
                self._calls.clear()
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
    """Plugin that writes the running test to `now`, and adds a row to `tests` when a test has passed."""

    def __init__(self, place: Path) -> None:
        self._place, self._number, self._seconds, self._passed = place, 0, 0.0, True
        self._say()

    def _say(self) -> None:
        with (self._place / "now").open("r+b") as file:  # written in place: other processes have mapped the file
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
    """Trace this process. A `.pth` file calls this before all other code."""
    global tracer  # noqa: PLW0603 - one for the process
    tracer = Tracer(Path(place), frozenset(files))
    threading.settrace(tracer.call)
    sys.settrace(tracer.call)


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Plugin(tracer.place))


tracer: Tracer
