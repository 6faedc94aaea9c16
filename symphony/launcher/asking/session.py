"""A client's session with a program: passes on input, output and signals, for `symphony run`, `attach` and `logs`."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Any

from symphony.launcher.asking.terminal import Keys, raw_mode, window
from symphony.launcher.common import wire
from symphony.launcher.common.places import Refused
from symphony.launcher.common.statuses import SIGNALLED

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the client passes on to a program on pipes.
A program on a terminal gets keys instead, such as Ctrl-C.
"""
_BROKEN_PIPE = SIGNALLED + signal.SIGPIPE
_DETACHED = 0


class Session:
    """Session with a program: passes on streams, keys and signals until the program ends or the user detaches."""

    def __init__(self, connection: socket.socket, *, sends: bool, tty: bool) -> None:
        """`sends`: standard input and signals go to the program. `tty`: the program has a terminal."""
        self._connection = connection
        self._sends = sends
        self._is_raw = tty and sends and window() is not None
        self._keys = Keys()
        self._may_send = True
        """Whether the program has taken all input that was sent."""
        self._leaves = False
        self._woken = -1
        """Descriptor that becomes readable when a signal arrives."""

    def run(self) -> int:
        """Run the session, and return the exit status: the program's, or 0 if the user detached."""
        with ExitStack() as stack:
            if self._is_raw:
                stack.enter_context(raw_mode())
            self._take_signals()
            if self._is_raw:
                self._resize(0, None)  # the window of an attaching client may have another size
            try:
                return self._loop()
            except BrokenPipeError:
                sys.stdout = sys.stderr = None  # the reader of the output is gone
                return _BROKEN_PIPE

    def _take_signals(self) -> None:
        numbers = [*PASSED_ON] if self._sends else []
        self._woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._pass_on)
        if self._sends:
            signal.signal(signal.SIGTSTP, self._stop)
            signal.signal(signal.SIGWINCH, self._resize)

    def _pass_on(self, number: int, _frame: object) -> None:
        self._tell({"do": "signal", "signal": number})

    def _stop(self, _number: int, _frame: object) -> None:
        """On Ctrl-Z, stop the program and this client. When this client continues, the program continues, too."""
        self._tell({"do": "signal", "signal": signal.SIGSTOP})
        os.kill(os.getpid(), signal.SIGSTOP)
        self._tell({"do": "signal", "signal": signal.SIGCONT})

    def _resize(self, _number: int, _frame: object) -> None:
        size = window()
        if size is not None:
            self._tell({"do": "resize", "window": size})

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the loop will notice that the launcher is gone
            wire.send(self._connection, message)

    def _loop(self) -> int:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._woken, select.POLLIN)  # a signal that arrives just before poll() also wakes it
        reads = self._sends
        while True:
            if reads and self._may_send:
                poll.register(0, select.POLLIN)
            elif reads or not self._sends:
                with suppress(KeyError, OSError):
                    poll.unregister(0)
            ready = {fd for fd, _ in poll.poll()}
            if self._woken in ready:
                os.read(self._woken, 4096)
            if self._connection.fileno() in ready:
                status = self._receive()
                if status is not None:
                    return status
            if 0 in ready and self._may_send:
                reads = self._read()
                if not reads:
                    poll.unregister(0)
            if self._leaves:
                self._tell({"do": "detach"})
                return _DETACHED

    def _receive(self) -> int | None:
        kind, content = wire.receive(self._connection)
        if kind == wire.OUTPUT:
            _write(1, content)
        elif kind == wire.ERROR:
            _write(2, content)
        elif kind == wire.JSON:
            if content["event"] == "ended":
                return int(content["status"] or 0)
            self._may_send = True
        else:
            raise Refused("the launcher went away, and the program with it")
        return None

    def _read(self) -> bool:
        """Send a chunk of input to the program. False: the input has ended."""
        try:
            content = os.read(0, wire.CHUNK_BYTES)
        except OSError:
            content = b""
        if not content:
            with suppress(OSError):
                self._connection.send(wire.INPUT)
            return False
        if self._is_raw:
            content, self._leaves = self._keys.typed(content)
        if content:
            self._may_send = False
            with suppress(OSError):
                self._connection.send(wire.INPUT + content)
        return True


def _write(number: int, content: bytes) -> None:
    """Write all of `content`, even to a non-blocking descriptor.
    Refused: the write fails, for example on a full disk.
    """
    while content:
        try:
            content = content[os.write(number, content) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(number, select.POLLOUT)
            writable.poll()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Refused(f"what the program writes can't be passed on: {error.strerror}") from None
