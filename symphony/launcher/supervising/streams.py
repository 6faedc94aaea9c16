"""The launcher's ends of a process's streams. Output goes to the log, and input from clients goes to the process."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
import termios
from collections.abc import Callable

from symphony.launcher.common.wire import CHUNK_BYTES, ERROR, OUTPUT
from symphony.launcher.supervising.program_log import ProgramLog

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause before another attempt to write a log, after an error such as a full disk."""


class Streams:
    """Pipes or a terminal for one process.
    `stdin`, `stdout` and `stderr` are the process's ends; `started` closes them.
    """

    def __init__(
        self,
        sink: ProgramLog,
        *,
        has_input: bool,
        window: tuple[int, int] | None,
        error_apart: bool,
        on_output: Callable[[], None],
    ) -> None:
        """`window`: rows and columns of the process's terminal. None: the process gets pipes."""
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._on_output = on_output
        self._sources: dict[int, bytes] = {}
        self._unwritten: tuple[bytes, bytes] | None = None
        """Stream and bytes that were read, but could not be logged yet, for instance because the disk is full."""
        self._is_last = False
        self.closed = self._loop.create_future()
        """Done when the log has all of the process's output."""
        self.terminal = -1
        self._input = -1
        self._pending = b""
        self._on_taken: list[Callable[[], None]] = []
        self._is_at_end = False
        self._theirs: list[int] = []
        if window is None:
            self._open_pipes(has_input=has_input, error_apart=error_apart)
        else:
            self._open_terminal(window, error_apart=error_apart)
        for fd in self._sources:
            os.set_blocking(fd, False)
        self.stdin, self.stdout, self.stderr = self._theirs

    def _open_pipes(self, *, has_input: bool, error_apart: bool) -> None:
        if has_input:
            stdin, self._input = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._input, False)
        else:
            stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        stdout = self._pipe(OUTPUT)
        self._theirs = [stdin, stdout, self._pipe(ERROR) if error_apart else stdout]

    def _open_terminal(self, window: tuple[int, int], *, error_apart: bool) -> None:
        self.terminal, slave = os.openpty()
        self._sources[self.terminal] = OUTPUT
        self._input = self.terminal
        self._theirs = [slave, slave, self._pipe(ERROR) if error_apart else slave]
        self.resize(*window)

    def _pipe(self, stream: bytes) -> int:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        self._sources[ours] = stream
        return theirs

    def started(self) -> None:
        """Close the launcher's copies of the process's ends, and begin to read the process's output."""
        for fd in set(self._theirs):
            os.close(fd)
        for fd in self._sources:
            self._loop.add_reader(fd, self._read, fd)

    def abandon(self) -> None:
        """Close all descriptors, since no process was started."""
        for fd in {*self._theirs, *self._sources, self._input} - {-1}:
            os.close(fd)
        self._sources.clear()
        self._input = -1

    def resize(self, rows: int, columns: int) -> None:
        if self.terminal in self._sources:
            fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    # Output of the process.

    def _read(self, fd: int) -> None:
        while fd in self._sources:
            if self._unwritten is not None or self._sink.must_wait:
                for source in self._sources:
                    self._loop.remove_reader(source)
                return
            try:
                content = os.read(fd, CHUNK_BYTES)
            except BlockingIOError:
                if self._is_last:
                    self._close(fd)
                return
            except OSError:  # EIO: no process has the terminal's other end open
                content = b""
            if not content:
                self._close(fd)
                return
            self._write(self._sources[fd], content)
            if not self._is_last:
                return

    def _write(self, stream: bytes, content: bytes) -> None:
        try:
            self._sink.append(stream, content)
        except OSError as error:
            log.warning("the log of a program can't be written: %s", error.strerror)
            self._unwritten = stream, content
            self._loop.call_later(RETRY_S, self._write_again)
            return
        self._on_output()

    def _write_again(self) -> None:
        stream, content = self._unwritten or (OUTPUT, b"")
        self._unwritten = None
        self._write(stream, content)
        self.go_on()

    def go_on(self) -> None:
        """Resume reading the process's output after a pause."""
        for fd in list(self._sources):
            self._loop.add_reader(fd, self._read, fd)

    def finish(self) -> None:
        """Read the last output of a process that has ended, and close its input."""
        self._is_last = True
        self.end_input()
        for fd in list(self._sources):
            self._read(fd)
        self._tell_closed()

    def _close(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        if fd == self._input:
            self._drop_input()
        del self._sources[fd]
        os.close(fd)
        self._tell_closed()

    def _tell_closed(self) -> None:
        if self._is_last and not self._sources and not self.closed.done():
            self.closed.set_result(None)

    # Input of the process.

    def give(self, content: bytes, on_taken: Callable[[], None]) -> None:
        """Write input to the process. `on_taken` is called when the pipe has all of it, or has no reader left."""
        if self._input < 0 or self._is_at_end:
            on_taken()
            return
        self._pending += content
        self._on_taken.append(on_taken)
        self._feed()

    def _feed(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._input, self._pending) :]
        except BlockingIOError:
            self._loop.add_writer(self._input, self._feed)
            return
        except OSError:  # the process has closed its end
            self._pending = b""
        self._loop.remove_writer(self._input)
        if self._is_at_end:
            self._drop_input()
        self._tell_taken()

    def _tell_taken(self) -> None:
        waiting, self._on_taken = self._on_taken, []
        for on_taken in waiting:
            on_taken()

    def end_input(self) -> None:
        """End the input of the process. A terminal stays open."""
        if self.terminal >= 0:
            return
        self._is_at_end = True
        if not self._pending:
            self._drop_input()

    def _drop_input(self) -> None:
        if self._input < 0:
            return
        fd, self._input, self._pending = self._input, -1, b""
        self._loop.remove_writer(fd)
        if fd != self.terminal:
            os.close(fd)
        self._tell_taken()
