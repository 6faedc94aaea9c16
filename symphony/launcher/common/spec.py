"""Spec: the description of a program to start, from a client or from another program.
This module checks the spec, which never changes afterwards.
"""

from __future__ import annotations

import dataclasses
import re
import resource
from dataclasses import dataclass, field
from typing import Any

from symphony.launcher.common import walls
from symphony.launcher.common.grants import checked_grants
from symphony.launcher.common.places import Refused

MAX_NAME = 56
"""Longest name of a program. With a number appended, the name still fits the daemon's limit."""
NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,{MAX_NAME - 1}}}")
ID = re.compile(r"[0-9a-f]{8}")
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.+-]")
STANDARD, NONE = "standard", "none"
"""Kinds of isolation: in a sandbox, or without a sandbox."""
SOCKET_INSIDE = "/run/symphony.sock"
"""Path of the program's socket, inside a sandbox."""
RLIMITS = tuple(name for name in dir(resource) if name.startswith("RLIMIT_"))
DEFAULT_RETRIES = 5
_COUNTED, _TOO_MANY = frozenset({"memory", "processes"}), 1 << 62
"""Limits that the kernel enforces. Their values must be whole numbers below `_TOO_MANY`."""
ISOLATIONS = "standard", "none"


@dataclass(frozen=True, slots=True)
class LaunchLimits:
    """Limits of a program. A program that exceeds a limit is ended. None: no limit."""

    time: float | None = None
    """Wall-clock time from the program's first start, in seconds."""
    memory: int | None = None
    """Memory of all processes of the program together, in bytes."""
    processes: int | None = None
    tokens: int | None = None
    pages: int | None = None
    page_seconds: float | None = None

    def within(self, other: LaunchLimits) -> LaunchLimits:
        """Return the lower of both limits for each resource."""
        pairs = [(each.name, getattr(self, each.name), getattr(other, each.name)) for each in dataclasses.fields(self)]
        return LaunchLimits(
            **{name: min((one for one in both if one is not None), default=None) for name, *both in pairs}
        )

    def of_the_daemon(self) -> dict[str, float]:
        """Return the limits that the daemon enforces, without limits that are None."""
        counted = {"tokens": self.tokens, "pages": self.pages, "page_seconds": self.page_seconds}
        return {name: limit for name, limit in counted.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart policy: how often a program that fails is started again."""

    retries: int = 0

    @classmethod
    def parse(cls, text: str) -> Restart:
        """Parse `no`, `on-failure` or `on-failure:N`. Refused: the text is something else."""
        found = re.fullmatch(r"no|on-failure(?::(\d{1,6}))?", text)
        if found is None:
            raise Refused(f"restart is {text!r}: give no, on-failure or on-failure:N")
        if text == "no":
            return cls(0)
        return cls(DEFAULT_RETRIES if found[1] is None else int(found[1]))


@dataclass(frozen=True, slots=True)
class Spec:
    """Description of a program to start."""

    path: str
    python: bool
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    name: str | None = None
    id: str | None = None
    """Id that the client has chosen. A client on another machine so knows it before the program begins."""
    limits: LaunchLimits = field(default_factory=LaunchLimits)
    restart: Restart = field(default_factory=Restart)
    has_input: bool = True
    """Whether standard input is a pipe. If not, it is /dev/null."""
    tty: bool = False
    error_apart: bool = True
    """Whether standard error is a separate stream. False if the client's output and error are the same file."""
    isolation: str = STANDARD
    shows: list[tuple[str, str, bool]] = field(default_factory=list)
    """Paths that the sandbox shows beside system files: name inside, real path, whether the program may write."""
    home: tuple[str, str] | None = None
    """Name and real path of the home directory. The sandbox has a private directory in its place."""
    empty: list[str] = field(default_factory=list)
    """Directories that are empty in the sandbox."""
    allow_net: list[tuple[str, int]] = field(default_factory=list)
    """Grants: hosts and ports to which the program may connect."""
    venv: str | None = None
    """Virtual environment whose packages the program imports."""
    ships: str | None = None
    """Path of the shipped program that runs if `path` does not exist."""
    stands_for: str | None = None
    """MACHINE:ID of the program on another machine for which this one stands in."""
    umask: int = 0o022
    rlimits: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_isolated(self) -> bool:
        return self.isolation != NONE

    @property
    def memory(self) -> int | None:
        """Memory limit of all processes of the program together, in bytes. The default applies only in a sandbox."""
        return walls.MEMORY_BYTES if self.limits.memory is None and self.is_isolated else self.limits.memory

    @property
    def tasks(self) -> int | None:
        """Kernel's limit on processes and threads in the sandbox. None: there is no sandbox.
        The kernel's limit is above the user's limit on processes, so that the launcher sees that a program exceeds the
        user's.
        """
        return min(walls.TASKS + (self.limits.processes or 0), walls.MOST_TASKS) if self.is_isolated else None


def checked(given: dict[str, Any]) -> Spec:
    """Check the description in a message, and return it as a Spec. Refused: a value is invalid."""
    words = dict(given)
    try:
        words["limits"] = _limits(words.get("limits") or {})
        words["restart"] = Restart.parse(words.get("restart") or "no")
        words["args"] = [_text(each) for each in words.get("args", [])]
        words["env"] = {_text(key): _text(value) for key, value in words.get("env", {}).items()}
        for key in words["env"]:
            if not key or "=" in key:
                raise Refused(f"{key!r} is no name of a variable")
        words["rlimits"] = {key: tuple(map(int, pair)) for key, pair in words.get("rlimits", {}).items()}
        words["empty"] = [_text(each) for each in words.get("empty", [])]
        words["home"] = tuple(map(_text, words["home"])) if words.get("home") else None
        words["shows"] = [(_text(path), _text(real), bool(write)) for path, real, write in words.get("shows", [])]
        words["allow_net"] = checked_grants([(_text(host), int(port)) for host, port in words.get("allow_net", [])])
        spec = Spec(**words)
        _text(spec.path), _text(spec.cwd), _text(spec.venv or ""), _text(spec.ships or "")
    except (TypeError, ValueError, AttributeError) as error:
        raise Refused(f"the program can't be understood: {error}") from None
    if spec.isolation not in ISOLATIONS:
        raise Refused(f"there is no isolation {spec.isolation!r}: give {' or '.join(ISOLATIONS)}")
    if not set(spec.rlimits) <= set(RLIMITS):
        raise Refused("the program can't be understood: it has unknown resource limits")
    if spec.id is not None and not ID.fullmatch(spec.id):
        raise Refused(f"{spec.id!r} is no id: 8 digits of 0-9 and a-f")
    if spec.name is not None and not NAME.fullmatch(spec.name):
        raise Refused(f"{spec.name!r} is no name: 1 to {MAX_NAME} of letters, digits, _ . + -, the first none of . + -")
    return spec


def _limits(given: dict[str, Any]) -> LaunchLimits:
    known = {each.name for each in dataclasses.fields(LaunchLimits)}
    for name, limit in given.items():
        if name not in known:
            raise Refused(f"there is no limit {name!r}: {', '.join(sorted(known))} can be limited")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
            raise Refused(f"the limit of {name} is {limit!r}: it has to be a number above 0")
        if limit is not None and name in _COUNTED and not 1 <= limit < _TOO_MANY:
            raise Refused(f"the limit of {name} is {limit!r}: the kernel counts from 1 to {_TOO_MANY - 1:,}")
    return LaunchLimits(**{name: int(limit) if limit and name in _COUNTED else limit for name, limit in given.items()})


def _text(value: object) -> str:
    """Return `value`. ValueError: it is not text, or has a NUL, which a C string can't hold."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{value!r:.40} is no text without NUL")
    return value
