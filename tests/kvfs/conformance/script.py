"""Scripts of file operations, one a line, to be run on two file systems and compared.

    mkdir d 0755                      # root does it; it must succeed
    ann: chmod d 0700 -> EPERM        # ann does it; what every name then is, is compared as well
    open d/f O_WRONLY -> *            # whatever happens, it happens on both

Names that begin with `%` stand for what is too long to write; see `LONG`.
"""

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from tests.kvfs.conformance.operations import OPERATIONS

ANYTHING, OK = "*", "ok"


@dataclass(frozen=True, slots=True)
class User:
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


USERS = {
    "root": User(0, 0),
    "ann": User(65534, 65534, (65531, 65530)),
    "bob": User(65533, 65533),
    "eve": User(65532, 65532, (65534,)),  # in ann's group, as a supplementary one
    "kim": User(65529, 65534),  # in ann's group, as the primary one
}

LONG = {
    "%255": "n" * 255,
    "%256": "n" * 256,
    "%path4095": "." + "/" * 4093 + "f",
    "%path4096": "." + "/" * 4094 + "f",
    "%bytes": os.fsdecode(bytes(set(range(1, 256)) - set(b"/"))),
    "%empty": "",
}

_FLAGS = {name: value for name, value in vars(os).items() if name.startswith("O_")}
_FLAGS |= {"NOREPLACE": 1, "EXCHANGE": 2, "WHITEOUT": 4}
_TYPES = {"block": stat.S_IFBLK, "char": stat.S_IFCHR, "fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK}
_TYPES |= {"regular": stat.S_IFREG, "dir": stat.S_IFDIR, "none": 0}


@dataclass(frozen=True, slots=True)
class Step:
    """An operation of a script. If it has an expectation, all `paths` are looked at before and after it."""

    line: str
    user: User
    operation: str
    arguments: tuple[str | int, ...]
    expected: str | None


@dataclass(frozen=True, slots=True)
class Case:
    """A script that runs in a new directory of its own. `paths` are all paths that it mentions."""

    steps: tuple[Step, ...]
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(step.line for step in self.steps)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a step on one file system, and the state of each path (a tuple, or an errno's name) if a step expects
    anything.
    """

    result: Any
    after: dict[str, Any] | None


def case(text: str) -> Case:
    """A script as text."""
    lines = [line.split(" #")[0].strip() for line in text.splitlines()]
    steps = [_step(line) for line in lines if line and not line.startswith("#")]
    paths: dict[str, None] = {".": None}
    for step in steps:
        for code, argument in zip(OPERATIONS[step.operation][0], step.arguments, strict=False):
            if code == "p" and isinstance(argument, str) and len(argument) < 3000:
                paths[argument] = None
    return Case(tuple(steps), tuple(paths))


def _step(line: str) -> Step:
    words, _, expected = line.partition("->")
    user, _, call = words.rpartition(": ")
    first, *rest = call.split()
    codes, _ = OPERATIONS[first]
    assert len(rest) <= len(codes), line
    arguments = tuple(_argument(code, word) for code, word in zip(codes, rest, strict=False))
    return Step(line, USERS[user.strip() or "root"], first, arguments, expected.strip() or None)


def _argument(code: str, word: str) -> str | int:
    match code:
        case "m":
            return int(word, 8)
        case "i":
            return int(word, 0)
        case "u":
            return USERS[word].uid if word in USERS else int(word)
        case "f":
            return reduce(or_, (_FLAGS[flag] if flag in _FLAGS else int(flag, 0) for flag in word.split(",")))
        case "t":
            return _TYPES[word]
        case _:
            return "/".join(LONG.get(part, part) for part in word.split("/"))


def name_of(code: int | None) -> str:
    """An errno's name; Linux has two for EOPNOTSUPP."""
    return {errno.EOPNOTSUPP: "EOPNOTSUPP"}.get(code or 0) or errno.errorcode.get(code or 0, str(code))


def every(template: str, **choices: Iterable[str] | str) -> list[Case]:
    """The scripts that a template with {names} in it gives for all combinations of the choices: words, or `a; b; c`."""
    filled = [template]
    for name, values in choices.items():
        words = [value.strip() for value in values.split(";")] if isinstance(values, str) else list(values)
        filled = [text.replace("{" + name + "}", word) for text in filled for word in words]
    return [case(text) for text in filled]
