"""What `symphony run`, `attach` and `logs` do with their own descriptors while a program has them."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Any

from symphony.launcher import wire
from symphony.launcher.places import Refused
from symphony.launcher.statuses import SIGNALLED
from symphony.launcher.terminal import Keys, raw_mode, window

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""To a program on pipes. On a terminal of its own it has Ctrl-C and the like as keys."""
_BROKEN_PIPE = SIGNALLED + signal.SIGPIPE
_DETACHED = 0


class Session:
    """Streams, keys and signals, until the program ends or the user leaves."""

    def __init__(self, connection: socket.socket, *, sends: bool, tty: bool) -> None:
        """`sends`: standard input goes to the program. `tty`: the program has a terminal."""
        self._connection = connection
        self._sends = sends
        self._is_raw = tty and sends and window() is not None
        self._keys = Keys()
        self._may_send = True
        """All that was sent has been taken."""
        self._leaves = False
        self._woken = -1
        """Readable when a signal has come."""

    def run(self) -> int:
        """The exit status: the program's, or 0 of a user who left it."""
        with ExitStack() as stack:
            if self._is_raw:
                stack.enter_context(raw_mode())
            self._take_signals()
            if self._is_raw:
                self._resize(0, None)  # who attaches may have a window of another size
            try:
                return self._loop()
            except BrokenPipeError:
                sys.stdout = sys.stderr = None  # nothing is left to say to nobody
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
        """Ctrl-Z: the program stops with its client, and goes on with it."""
        self._tell({"do": "signal", "signal": signal.SIGSTOP})
        os.kill(os.getpid(), signal.SIGSTOP)
        self._tell({"do": "signal", "signal": signal.SIGCONT})

    def _resize(self, _number: int, _frame: object) -> None:
        size = window()
        if size is not None:
            self._tell({"do": "resize", "window": size})

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the loop is about to see that the launcher has gone
            wire.send(self._connection, message)

    def _loop(self) -> int:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._woken, select.POLLIN)  # a signal that comes just before poll() is handled now, too
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
        """Sends a stretch of input; whether there may be more."""
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
    """All of it, also where somebody made the descriptor a non-blocking one. Refused: no room, or no such place."""
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
