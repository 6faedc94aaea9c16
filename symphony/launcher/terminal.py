"""The client's own terminal while a program has it."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

DETACH = b"\x10\x11"
"""Ctrl-P Ctrl-Q, as docker has it."""


def is_terminal(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:
        return False


def window(number: int = 0) -> tuple[int, int] | None:
    """Rows and columns; None: it is no terminal."""
    try:
        size = os.get_terminal_size(number)
    except OSError:
        return None
    return size.lines, size.columns


@contextmanager
def raw_mode(number: int = 0) -> Iterator[None]:
    """Every key goes to the program as it is, Ctrl-C too; afterwards the terminal is as it was."""
    before = termios.tcgetattr(number)
    tty.setraw(number, termios.TCSADRAIN)  # what is typed already is the program's, too
    try:
        yield
    finally:
        sys.stdout.flush()
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def same_place(one: int, other: int) -> bool:
    """Both descriptors are open on one file, pipe or terminal: who writes to both writes to one place."""
    try:
        first, second = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (first.st_dev, first.st_ino, first.st_rdev) == (second.st_dev, second.st_ino, second.st_rdev)


class Keys:
    """Finds Ctrl-P Ctrl-Q in what is typed. A Ctrl-P is held back until the next key says what it was."""

    def __init__(self) -> None:
        self._held = b""

    def typed(self, keys: bytes) -> tuple[bytes, bool]:
        """What goes to the program; whether the user wants to leave it."""
        keys = self._held + keys
        before, found, _ = keys.partition(DETACH)
        if found:
            return before, True
        self._held = DETACH[:1] if keys.endswith(DETACH[:1]) else b""
        return keys.removesuffix(self._held) if self._held else keys, False
