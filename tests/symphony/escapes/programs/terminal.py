"""Attacks on the terminal that `symphony run` was called at."""

import ctypes
import fcntl
import termios
from collections.abc import Callable

from attack import Attack, World, syscall


def _at_its_streams(name: str, tries: str, tried: Callable[[int], object]) -> Attack:
    """Try each standard stream; tell the first that allowed it, or raise the last refusal."""

    def run(_world: World) -> str:
        for number in range(3):
            try:
                tried(number)
            except OSError as error:
                refusal = error
            else:
                return f"done at descriptor {number}"
        raise refusal

    return Attack(name, tries, run, "a test need not have a terminal")


MANY = [
    _at_its_streams(
        "pushes_into_its_streams",
        "Pushes letters into its own standard streams, which a shell may read next",
        lambda number: fcntl.ioctl(number, termios.TIOCSTI, b"x"),
    ),
    _at_its_streams(
        "pushes_by_a_wide_number",
        "Pushes letters by a number whose upper half a filter may look at and the kernel does not",
        lambda number: syscall(16, number, (1 << 32) | termios.TIOCSTI, ctypes.create_string_buffer(b"x")),
    ),
    _at_its_streams(
        "pastes_into_its_streams",
        "Has the console paste what it selected, by TIOCLINUX",
        lambda number: fcntl.ioctl(number, 0x541C, b"\x03"),
    ),
    _at_its_streams(
        "changes_their_discipline",
        "Has the terminal's letters handled by other code of the kernel, by TIOCSETD",
        lambda number: fcntl.ioctl(number, 0x5423, b"\x00\x00\x00\x00"),
    ),
]
