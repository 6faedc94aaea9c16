"""Attacks on the terminal that `symphony run` was called at."""

from __future__ import annotations

import ctypes
import fcntl
import os
import termios
from collections.abc import Callable

from attack import World, attack, syscall


@attack()
def types_on_the_terminal(world: World) -> str:
    """Pushes a command into the user's terminal by TIOCSTI."""
    fd = os.open(world["terminal"], os.O_RDWR | os.O_NOCTTY)
    for letter in world["typed"]:
        fcntl.ioctl(fd, termios.TIOCSTI, letter.encode())
    return "typed"


@attack()
def writes_on_the_terminal(world: World) -> str:
    """Writes to the user's terminal."""
    fd = os.open(world["terminal"], os.O_WRONLY | os.O_NOCTTY)
    return f"wrote {os.write(fd, b'x')} byte"


_PASTE = getattr(termios, "TIOCLINUX", 0x541C)


def _at_its_streams(did: str, tried: Callable[[int], object]) -> str:
    """Try each standard stream; tell the first that allowed it, or raise the last refusal."""
    for number in range(3):
        try:
            tried(number)
        except OSError as error:
            refusal = error
        else:
            return f"{did} at descriptor {number}"
    raise refusal


@attack(no_control="a test need not have a terminal")
def pushes_into_its_streams(_world: World) -> str:
    """Pushes letters into its own standard streams, which a shell may read next."""
    return _at_its_streams("typed", lambda number: fcntl.ioctl(number, termios.TIOCSTI, b"x"))


@attack(no_control="a test need not have a terminal")
def pushes_by_a_wide_number(_world: World) -> str:
    """Pushes letters by a number whose upper half a filter may look at and the kernel does not."""
    letter = ctypes.create_string_buffer(b"x")
    return _at_its_streams("typed", lambda number: syscall(16, number, (1 << 32) | termios.TIOCSTI, letter))


@attack(no_control="a test need not have a terminal")
def pastes_into_its_streams(_world: World) -> str:
    """Has the console paste what it selected, by TIOCLINUX."""
    return _at_its_streams("pasted", lambda number: fcntl.ioctl(number, _PASTE, b"\x03"))


@attack(no_control="a test need not have a terminal")
def controlling_terminal(_world: World) -> str:
    """Opens the terminal that controls it."""
    os.close(os.open("/dev/tty", os.O_RDWR))
    return "opened /dev/tty"
