"""What a program is to be, as a client or another program asks for it: checked here, frozen from here on."""

from __future__ import annotations

import dataclasses
import re
import resource
from dataclasses import dataclass, field
from typing import Any

from symphony.launcher import walls
from symphony.launcher.grants import checked_grants
from symphony.launcher.places import Refused

MAX_NAME = 56
"""With a number behind it the daemon still takes it."""
NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,{MAX_NAME - 1}}}")
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.+-]")
STANDARD, NONE = "standard", "none"
"""Isolation: a sandbox, or nothing."""
SOCKET_INSIDE = "/run/symphony.sock"
"""What a program in a sandbox connects to."""
RLIMITS = tuple(name for name in dir(resource) if name.startswith("RLIMIT_"))
DEFAULT_RETRIES = 5
_COUNTED, _TOO_MANY = frozenset({"memory", "processes"}), 1 << 62
"""Limits that the kernel holds, by whole numbers."""
ISOLATIONS = "standard", "none"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use until it is ended; None: as much as there is."""

    time: float | None = None
    """Seconds by the clock on the wall, from its first start on."""
    memory: int | None = None
    """Bytes of all of its processes together."""
    processes: int | None = None
    tokens: int | None = None
    pages: int | None = None
    page_seconds: float | None = None

    def within(self, other: Limits) -> Limits:
        """These, and none above those of `other`."""
        pairs = [(each.name, getattr(self, each.name), getattr(other, each.name)) for each in dataclasses.fields(self)]
        return Limits(**{name: min((one for one in both if one is not None), default=None) for name, *both in pairs})

    def of_the_daemon(self) -> dict[str, float]:
        """Those that the daemon counts."""
        counted = {"tokens": self.tokens, "pages": self.pages, "page_seconds": self.page_seconds}
        return {name: limit for name, limit in counted.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Restart:
    """Whether a program that failed is started again, and how often."""

    retries: int = 0

    @classmethod
    def parse(cls, text: str) -> Restart:
        """`no`, `on-failure` or `on-failure:N`."""
        found = re.fullmatch(r"no|on-failure(?::(\d{1,6}))?", text)
        if found is None:
            raise Refused(f"restart is {text!r}: give no, on-failure or on-failure:N")
        if text == "no":
            return cls(0)
        return cls(DEFAULT_RETRIES if found[1] is None else int(found[1]))


@dataclass(frozen=True, slots=True)
class Spec:
    """A program that is to be started."""

    path: str
    python: bool
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    name: str | None = None
    limits: Limits = field(default_factory=Limits)
    restart: Restart = field(default_factory=Restart)
    has_input: bool = True
    """A pipe to its standard input; else there is nothing to read."""
    tty: bool = False
    error_apart: bool = True
    """Standard error is a stream of its own: not where the client has both at one place."""
    isolation: str = STANDARD
    shows: list[tuple[str, str, bool]] = field(default_factory=list)
    """What its sandbox shows for its sake: by which name, where that is without links, and whether it may write there.
    """
    home: tuple[str, str] | None = None
    """Its home directory, by name and without links: it has one of its own there."""
    empty: list[str] = field(default_factory=list)
    """Directories that its sandbox has, with nothing in them."""
    allow_net: list[tuple[str, int]] = field(default_factory=list)
    """Hosts and ports that it may connect to."""
    venv: str | None = None
    """A virtual environment whose packages it has."""
    ships: str | None = None
    """A program that ships with Symphony, if there is no file at `path`."""
    umask: int = 0o022
    rlimits: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_isolated(self) -> bool:
        return self.isolation != NONE

    @property
    def memory(self) -> int | None:
        """Bytes of all of its processes together, whether it asked for a limit or not."""
        return walls.MEMORY_BYTES if self.limits.memory is None and self.is_isolated else self.limits.memory

    @property
    def tasks(self) -> int | None:
        """Processes and threads. A limit on processes ends the program, so that one is met first."""
        return min(walls.TASKS + (self.limits.processes or 0), walls.MOST_TASKS) if self.is_isolated else None


def checked(given: dict[str, Any]) -> Spec:
    """A Spec of what came in a message."""
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
    if spec.name is not None and not NAME.fullmatch(spec.name):
        raise Refused(f"{spec.name!r} is no name: 1 to {MAX_NAME} of letters, digits, _ . + -, the first none of . + -")
    return spec


def _limits(given: dict[str, Any]) -> Limits:
    known = {each.name for each in dataclasses.fields(Limits)}
    for name, limit in given.items():
        if name not in known:
            raise Refused(f"there is no limit {name!r}: {', '.join(sorted(known))} can be limited")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
            raise Refused(f"the limit of {name} is {limit!r}: it has to be a number above 0")
        if limit is not None and name in _COUNTED and not 1 <= limit < _TOO_MANY:
            raise Refused(f"the limit of {name} is {limit!r}: the kernel counts from 1 to {_TOO_MANY - 1:,}")
    return Limits(**{name: int(limit) if limit and name in _COUNTED else limit for name, limit in given.items()})


def _text(value: object) -> str:
    """What a C string can hold."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{value!r:.40} is no text without NUL")
    return value
