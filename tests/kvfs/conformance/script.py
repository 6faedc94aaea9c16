"""Scripts of file operations, one a line, to be run on two file systems and compared.

    mkdir d 0755                      # root does it; it must succeed
    ann: chmod d 0700 -> EPERM        # ann does it; what every name then is, is compared as well
    open d/f O_WRONLY -> *            # whatever happens, it happens on both

Names that begin with `%` stand for what is too long to write; see `LONG`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ANYTHING = "*"
OK = "ok"


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

KINDS = ("regular", "dir", "fifo", "block", "char", "socket", "symlink")

_HALF = "x" * 127
LONG = {
    "%255": "n" * 255,
    "%256": "n" * 256,
    "%path4095": "." + "/" * 4093 + "f",
    "%path4096": "." + "/" * 4094 + "f",
    "%dirs": "/".join([_HALF] * 30),
    "%bytes": os.fsdecode(bytes(set(range(1, 256)) - set(b"/"))),
    "%empty": "",
    "%xattr256": "user." + "x" * 251,
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


Observation = dict[str, Any]
"""State of each path of a case: a tuple, or an errno's name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a step on one file system, with the state of all paths afterwards if the step had an expectation."""

    result: Any
    after: Observation | None


OPERATIONS = {
    # p a path, e an entry's name, m a mode in octal, i a number, u a user or group, f flags, t a type, s a word, h a
    # handle's name
    "make": "sp",
    "create": "pm",
    "open": "pfm",
    "mkdir": "pm",
    "mkfifo": "pm",
    "mknod": "ptmii",
    "bind": "p",
    "symlink": "sp",
    "link": "pp",
    "unlink": "p",
    "rmdir": "p",
    "rename": "pp",
    "renameat2": "ppf",
    "chmod": "pm",
    "chown": "puu",
    "lchown": "puu",
    "truncate": "pi",
    "utimens": "pss",
    "lutimens": "pss",
    "stat": "p",
    "lstat": "p",
    "readlink": "p",
    "access": "pi",
    "list": "p",
    "read": "p",
    "write": "ps",
    "append": "ps",
    "setxattr": "pss",
    "getxattr": "ps",
    "execute": "p",
    "umask": "m",
    # relative to an open directory
    "openat": "peffm",
    "mkdirat": "pem",
    "mkfifoat": "pem",
    "mknodat": "petm",
    "symlinkat": "spe",
    "linkat": "pepe",
    "unlinkat": "pe",
    "rmdirat": "pe",
    "renameat": "pepe",
    "fchmodat": "pem",
    "fchownat": "peuu",
    "fstatat": "pe",
    "readlinkat": "pe",
    "utimensat": "pess",
    "faccessat": "pei",
    # of a handle that stays open until the script ends
    "hold": "hpfm",
    "release": "h",
    "fstat": "h",
    "pread": "hii",
    "pwrite": "his",
    "ftruncate": "hi",
    "fallocate": "hii",
    "fchmod": "hm",
    "fchown": "huu",
    "futimens": "hss",
    "seek": "hii",
    "flink": "hp",
    "flist": "h",
    "copy": "hhi",
    "fsync": "h",
    # names that cannot be in memory
    "fault": "s",
}


def case(text: str) -> Case:
    """A script as text."""
    lines = [line.split(" #")[0].strip() for line in text.splitlines()]
    steps = [_step(line) for line in lines if line and not line.startswith("#")]
    paths: dict[str, None] = {".": None}
    for step in steps:
        for code, argument in zip(OPERATIONS[step.operation], step.arguments, strict=False):
            if code == "p" and isinstance(argument, str) and len(argument) < 3000:
                paths[argument] = None
    return Case(tuple(steps), tuple(paths))


def cases(*texts: str) -> list[Case]:
    return [case(text) for text in texts]


def _step(line: str) -> Step:
    words, _, expected = line.partition("->")
    first, *rest = words.split()
    user = "root"
    if first.endswith(":"):
        user = first[:-1]
        first, *rest = rest
    codes = OPERATIONS[first]
    assert len(rest) <= len(codes), line
    arguments = tuple(_argument(code, word) for code, word in zip(codes, rest, strict=False))
    return Step(line, USERS[user], first, arguments, expected.strip() or None)


def _argument(code: str, word: str) -> str | int:
    if code == "m":
        return int(word, 8)
    if code == "i":
        return int(word, 0)
    if code == "u":
        return USERS[word].uid if word in USERS else int(word)
    if code == "f":
        return _flags(word)
    if code == "t":
        return _TYPES[word]
    return _name(word)


def _flags(word: str) -> int:
    value = 0
    for flag in word.split(","):
        value |= _FLAGS[flag] if flag in _FLAGS else int(flag, 0)
    return value


def _name(word: str) -> str:
    return "/".join(_long(part) for part in word.split("/"))


def _long(part: str) -> str:
    for name, text in LONG.items():
        if part.startswith(name):
            return text + part[len(name) :]
    return part


def name_of(code: int | None) -> str:
    """An errno's name; Linux has two for EOPNOTSUPP."""
    return {errno.EOPNOTSUPP: "EOPNOTSUPP"}.get(code or 0) or errno.errorcode.get(code or 0, str(code))


def every(template: str, **choices: tuple[str, ...]) -> Iterator[Case]:
    """The scripts that a template with {names} in it gives for all combinations of the choices."""
    filled = [template]
    for name, values in choices.items():
        filled = [text.replace("{" + name + "}", value) for text in filled for value in values]
    yield from map(case, filled)
