"""Attacks: functions that try to get out of a sandbox, and return what they got."""

import ctypes
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

World = dict[str, Any]
"""Targets that the test made outside: paths, ports, pids, and the canary that they all hold."""


class Refused(Exception):
    """The attempt came to nothing, and no errno says why."""


@dataclass(frozen=True, slots=True)
class Attack:
    """An attempt to get out of the sandbox."""

    name: str
    tries: str
    run: Callable[[World], Any]
    """Function that returns its gain in a form for JSON. Nothing, or an OSError: the attack was blocked."""
    no_control: str | None = None
    """Why it is not tried without a sandbox; None: it is, as root, and has to achieve something there."""


def attack(*, no_control: str | None = None) -> Callable[[Callable[[World], Any]], Attack]:
    """Makes an attack of a function; its docstring says what it tries."""

    def made(run: Callable[[World], Any]) -> Attack:
        assert run.__doc__ is not None
        return Attack(run.__name__, run.__doc__.splitlines()[0].rstrip("."), run, no_control)

    return made


def attacks_in(modules: Iterable[ModuleType]) -> dict[str, Attack]:
    """Return all attacks of these modules, in their order: those with names of their own, and those in a list MANY."""
    found: dict[str, Attack] = {}
    for module in modules:
        for each in (*vars(module).values(), *getattr(module, "MANY", ())):
            if isinstance(each, Attack):
                assert each.name not in found or found[each.name] is each, f"two attacks are named {each.name}"
                found[each.name] = each
    return found


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long


def syscall(number: int, *args: Any) -> int:
    """A system call by its number. OSError: it failed."""
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in args]
    result = int(LIBC.syscall(ctypes.c_long(number), *words))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
