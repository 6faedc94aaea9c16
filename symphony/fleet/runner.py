"""Actor of Ray that runs Symphony's commands on its machine, for the user who has made the Ray cluster.

A program is started by `symphony run` on its machine. So it has the sandbox, the limits and the owner that it has
there without Ray, and it does not end with the actor.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

SYMPHONY = (sys.executable, "-P", "-m", "symphony.cli")
CHUNK_BYTES = 1 << 16

HEARTBEAT_S = 10.0
"""Pause of a command's output after which Ray looks whether the caller is there. If not, the command ends."""
FORGOTTEN_S = 600.0
"""Age at which the file of a program that the launcher does not know is removed."""

STATUS, OUTPUT, ERRORS = 0, 1, 2
"""Streams of a command: its exit status as digits, which comes last, standard output, and standard error."""


@dataclass(frozen=True, slots=True)
class Source:
    """File of a program that a user has submitted on another machine."""

    id: str
    """Id of the program."""
    name: str
    content: bytes
    is_executable: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A command for another machine."""

    uid: int
    """User who asks, by the number on the machine that asks."""
    words: tuple[str, ...]
    """The command without `symphony`."""
    source: Source | None = None
    """File that must be in the command's directory."""
    input: bytes = b""
    """Standard input of the command."""


class Runner:
    """Runs a user's commands on one machine."""

    def __init__(self, directory: str, programs: str, variables: dict[str, str]) -> None:
        """`directory`: where the files of programs are kept. `programs`: where the launcher keeps its programs.
        `variables`: the commands' environment. That of this process is Ray's.
        """
        self._directory = Path(directory)
        self._programs = Path(programs)
        self._variables = variables
        self._keeping = threading.Lock()  # Ray calls in several threads

    def call(self, request: Request) -> Generator[tuple[int, bytes], None, None]:
        """Run a command, and yield its output and its exit status as streams' numbers and contents.

        The first event comes before the command starts: it has no output, and says that this machine answers.
        """
        if request.uid != os.getuid():
            raise RuntimeError(f"uid {request.uid} asks, and the Ray of this machine belongs to uid {os.getuid()}")
        yield OUTPUT, b""
        # A program may read its directory: one without a file of its own must not see the files of others.
        where = self._directory / "empty" if request.source is None else self._kept(request.source)
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (
            _file_of(request.input) as given,
            subprocess.Popen(
                [*SYMPHONY, *request.words],
                cwd=where,
                env=self._variables,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            ) as command,
        ):
            try:
                yield from _output(command)
            except BaseException:  # for instance GeneratorExit: the caller has gone
                command.terminate()
                raise
        yield STATUS, b"%d" % command.returncode

    def _kept(self, source: Source) -> Path:
        """Write a program's file, and return its directory. The directory is kept as long as the launcher knows the
        program, or FORGOTTEN_S for a program that has not begun.
        """
        oldest_s = time.time() - FORGOTTEN_S
        with self._keeping:
            for each in self._directory.glob("[0-9a-f]" * 8):
                if not (self._programs / each.name).exists() and each.stat().st_mtime < oldest_s:
                    shutil.rmtree(each)
        where = self._directory / source.id
        where.mkdir(mode=0o700, parents=True)
        file = where / source.name
        file.write_bytes(source.content)
        file.chmod(0o700 if source.is_executable else 0o600)
        return where


def _file_of(content: bytes) -> BinaryIO:
    """Return a file in memory, at its beginning."""
    file = os.fdopen(os.memfd_create("input"), "w+b")
    file.write(content)
    file.seek(0)
    return file


def _output(command: subprocess.Popen[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield what a command writes, until it has closed both streams."""
    with selectors.DefaultSelector() as pipes:
        for number, pipe in ((OUTPUT, command.stdout), (ERRORS, command.stderr)):
            assert pipe is not None
            pipes.register(pipe, selectors.EVENT_READ, number)
        while pipes.get_map():
            ready = pipes.select(HEARTBEAT_S)
            if not ready:
                yield OUTPUT, b""
            for key, _ in ready:
                if chunk := os.read(key.fd, CHUNK_BYTES):
                    yield key.data, chunk
                else:
                    pipes.unregister(key.fileobj)


def run_options(given: Sequence[tuple[str, object]]) -> tuple[str, ...]:
    """Return options of `symphony run` as words, from their names and values. Lists give an option several times."""
    words = list[str]()
    for name, value in given:
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                words.append(f"--{name}={each}")
    return tuple(words)
