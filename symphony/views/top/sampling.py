"""Sampling of the daemon and this user's launcher, on a separate thread, so that neither can block the screen.

The daemon may end, restart, or stop answering. If a sample fails, a message says why, and the thread goes on sampling.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import libsym as sym
from libsym.channel.socket_path import find_socket
from libsym.errors import SymError
from symphony.launcher.asking import client
from symphony.launcher.asking.listing import OWN_NAME
from symphony.launcher.common.places import Places, Refused, find_places
from symphony.views.top.columns import ProgramRow

NUM_FILES = 200


@dataclass(frozen=True, slots=True)
class Sample:
    """State of a daemon and its programs at one moment."""

    taken_s: float
    """Time of the sample, by `time.monotonic()`."""
    info: Mapping[str, Any]
    programs: tuple[sym.ProgramInfo, ...]
    isolation: Mapping[str, str]
    """Isolation of the programs of this user's launcher, by program id."""
    files: tuple[sym.HotFile, ...]


def program_rows(before: Sample | None, now: Sample) -> list[ProgramRow]:
    """Return a row for each program, with its rates since the previous sample. The rates of a new program are 0."""
    was = {} if before is None else {each.id: each for each in before.programs}
    seconds = 1.0 if before is None else max(now.taken_s - before.taken_s, 1e-3)
    return [
        _program_row(each, was.get(each.id, each), seconds, now.isolation.get(each.id, "")) for each in now.programs
    ]


def _program_row(now: sym.ProgramInfo, was: sym.ProgramInfo, seconds: float, isolation: str) -> ProgramRow:
    return ProgramRow(
        program=now,
        isolation=isolation,
        tokens_per_s=max(0.0, now.usage.tokens - was.usage.tokens) / seconds,
        waiting=max(0.0, now.usage.queue_s - was.usage.queue_s) / seconds,
    )


@dataclass(frozen=True, slots=True)
class Gone:
    """Failed sample: the daemon does not answer. `why`: the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """Result of a user's action."""

    text: str
    failed: bool = False


News: TypeAlias = "Sample | Gone | Done"
Action: TypeAlias = Callable[["Daemon"], str]


class Daemon:
    """Access to a daemon, and to this user's launcher of programs for it."""

    def __init__(self, socket: Path | None) -> None:
        self.socket = socket or find_socket()
        self._places: Places = find_places(str(self.socket.absolute()))
        self._isolation: dict[str, str] = {}
        self._strangers: set[str] = set()
        """Ids of programs that the launcher does not know: they connected by themselves, or belong to other users."""

    def sample(self) -> Sample:
        """Take a sample. SymError: the daemon does not answer. Refused: the launcher does not answer as it should."""
        sym.connect(str(self.socket))
        me = sym.getpid()
        programs = tuple(
            each for each in sym.programs() if each.pid != me and (each.connections or each.name != OWN_NAME)
        )
        self._ask_launcher({each.id for each in programs})
        files = tuple(sym.kv_hot(NUM_FILES))
        return Sample(time.monotonic(), sym.daemon_stat(), programs, self._isolation, files)

    def _ask_launcher(self, ids: set[str]) -> None:
        """Ask the launcher for its programs, but only if there is a new program, so that an idle launcher can end."""
        self._strangers &= ids
        self._isolation = {each: how for each, how in self._isolation.items() if each in ids}
        if ids <= self._strangers | self._isolation.keys():
            return
        found = client.ask_living(self._places, {"do": "ps", "all": False}) or {"programs": []}
        self._isolation = {each["id"]: each["isolation"] for each in found["programs"] if each["id"] in ids}
        self._strangers = ids - self._isolation.keys()

    # Actions

    def kill(self, program: sym.ProgramInfo, signal: int, name: str) -> str:
        """Send a signal to a program, as `symphony kill` does. Refused: the program is not of this user's launcher."""
        message = {"do": "kill", "who": program.id, "signal": signal}
        if program.id not in self._isolation or client.ask_living(self._places, message) is None:
            raise Refused(
                f"{program.name} is no program of your launcher; its process is {program.pid}: end that yourself"
            )
        return f"{name} was sent to {program.name}"

    def pin(self, file: sym.HotFile) -> str:
        """Pin a file, or unpin it if it is pinned. Return a line about the result."""
        sym.kv_advise(file.path, sym.UNPIN if file.pinned else sym.PIN)
        return f"{file.path} is {'not pinned any more' if file.pinned else 'pinned'}"


class Sampling(threading.Thread):
    """Thread that takes samples at intervals, and passes them to `tell`.
    The thread may hang with the daemon, so it is never joined.
    """

    def __init__(self, daemon: Daemon, interval_s: float, tell: Callable[[News], None]) -> None:
        super().__init__(name="sampling", daemon=True)
        self._daemon = daemon
        self.interval_s = interval_s
        self._tell = tell
        self._actions: queue.SimpleQueue[Action | None] = queue.SimpleQueue()

    def ask(self, action: Action) -> None:
        """Queue an action. The thread runs it before the next sample, without waiting for the interval's end."""
        self._actions.put(action)

    def stop(self) -> None:
        """End the thread. Closing the connection also ends a call that waits for the daemon."""
        self._actions.put(None)
        sym.close()

    def run(self) -> None:
        while True:
            self._tell(self._attempt(self._daemon.sample, Gone))
            try:
                action = self._actions.get(timeout=self.interval_s)
            except queue.Empty:
                continue
            if action is None:
                return
            self._tell(self._attempt(partial(self._do, action), partial(Done, failed=True)))

    def _do(self, action: Action) -> Done:
        return Done(action(self._daemon))

    def _attempt(self, what: Callable[[], News], failed: Callable[[str], News]) -> News:
        try:
            return what()
        except (SymError, Refused) as error:
            return failed(str(error))
