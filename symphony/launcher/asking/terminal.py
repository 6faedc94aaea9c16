"""The client's own terminal, while a program uses it: raw mode, window size, and the keys that detach."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

DETACH = b"\x10\x11"
"""Keys that detach from the program: Ctrl-P Ctrl-Q, as in docker."""


def is_terminal(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:
        return False


def window(number: int = 0) -> tuple[int, int] | None:
    """Return the rows and columns of a terminal. None: the descriptor is no terminal."""
    try:
        size = os.get_terminal_size(number)
    except OSError:
        return None
    return size.lines, size.columns


@contextmanager
def raw_mode(number: int = 0) -> Iterator[None]:
    """Put the terminal into raw mode, so that every key reaches the program, even Ctrl-C. Restore it afterwards."""
    before = termios.tcgetattr(number)
    tty.setraw(number, termios.TCSADRAIN)  # keys that were typed before also reach the program
    try:
        yield
    finally:
        sys.stdout.flush()
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def same_place(one: int, other: int) -> bool:
    """Return whether both descriptors are open on the same file, pipe or terminal."""
    try:
        first, second = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (first.st_dev, first.st_ino, first.st_rdev) == (second.st_dev, second.st_ino, second.st_rdev)


class Keys:
    """Filter that finds Ctrl-P Ctrl-Q among typed keys. The filter holds a Ctrl-P back until the next key is known."""

    def __init__(self) -> None:
        self._held = b""

    def typed(self, keys: bytes) -> tuple[bytes, bool]:
        """Return the keys for the program, and whether the user typed the keys that detach."""
        keys = self._held + keys
        before, found, _ = keys.partition(DETACH)
        if found:
            return before, True
        self._held = DETACH[:1] if keys.endswith(DETACH[:1]) else b""
        return keys.removesuffix(self._held) if self._held else keys, False
