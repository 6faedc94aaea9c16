"""Messages to and from the user who launched this program, through the program's standard input and output.

Each program has its own pipes. So a user who stops reading stops only this program, when its pipe is full.
"""

from __future__ import annotations

import io
import json
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import Any

from libsym.errors import Invalid

_CHUNK_BYTES = 64 << 10


def send_to_user(x: Any, *more: Any) -> None:
    r"""Send text to the user who launched this program: write the arguments to standard output immediately, in order.

    Text and bytes are written unchanged. The pieces of an iterator are written as it yields them. Any other value
    becomes a line of JSON.

    >>> sym.send_to_user("hello\n")
    hello
    >>> sym.send_to_user((piece for piece in ("hel", "lo")), "\n")
    hello
    >>> sym.send_to_user({"answer": 42})
    {"answer": 42}
    """
    for each in (x, *more):
        if isinstance(each, Iterator):
            for piece in each:
                send_to_user(piece)
        else:
            _send(each)


def _send(x: Any) -> None:
    if isinstance(x, (bytes, bytearray, memoryview)):
        sys.stdout.flush()
        sys.stdout.buffer.write(x)
    elif isinstance(x, str):
        sys.stdout.write(x)
    else:
        try:
            line = json.dumps(x, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise Invalid(f"send_to_user() takes text, bytes, or what JSON can say: {error}") from error
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def recv_from_user() -> str:
    r"""Wait for the next line of standard input; return it without its newline. EOFError: the input has ended.

    Lines that the user sends early wait in the pipe. Do not use input() or sys.stdin in the same program: they read
    ahead, and so does this function.

    >>> import io, sys
    >>> sys.stdin = io.StringIO("a line\n")
    >>> sym.recv_from_user()
    'a line'
    """
    stream = standard_input()
    if isinstance(stream, int):
        return lines.next(stream)
    return ended(stream.readline())


def standard_input() -> int | Any:
    """Return the descriptor of standard input, or the object with which the program has replaced sys.stdin."""
    if sys.stdin is None:
        raise EOFError("this program has no standard input")
    try:
        return sys.stdin.fileno()
    except (io.UnsupportedOperation, AttributeError):
        return sys.stdin


def ended(line: str) -> str:
    """Return a line without its newline. EOFError: the line is empty, which means the end of input."""
    if not line:
        raise EOFError("the user sends nothing more")
    return line.removesuffix("\n")


class Lines:
    """Reader of standard input, line by line, for threads and tasks. A cancelled read loses no line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = b""
        self._at_end = False

    def next(self, descriptor: int) -> str:
        """Return the next line. The thread waits until a line has come."""
        with self._lock:
            while (line := self._take()) is None:
                self._read_on(descriptor)
        return line

    def next_nowait(self, descriptor: int) -> str | None:
        """Return the next line if it can be read without waiting. None: no line can be read, or a thread is reading."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            while (line := self._take()) is None and _is_ready(descriptor):
                self._read_on(descriptor)
        finally:
            self._lock.release()
        return line

    def _take(self) -> str | None:
        line, end, rest = self._read.partition(b"\n")
        if end:
            self._read = rest
        elif not self._at_end:
            return None
        elif line:
            self._read = b""
        else:
            raise EOFError("the user sends nothing more")
        return line.removesuffix(b"\r").decode(errors="replace")

    def _read_on(self, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK_BYTES)
        self._read += data
        self._at_end = not data


def _is_ready(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


lines = Lines()
"""The process's only reader of standard input."""
