"""Programs kept across a restart of the daemon: living programs with their usage, and the latest ended programs.

The state directory has them in one JSON file, which is replaced as a whole. The file may be damaged, so its values are
checked. A damaged file loses only this history.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from libsym.errors import Invalid
from scheduler.programs.limits import ProgramLimits
from scheduler.programs.program import Program, ProgramEnd
from scheduler.programs.used import Used

log = logging.getLogger(__name__)

_VERSION = 1
_MAX_NUMBER = 1 << 63
"""Bound of the times and process numbers in the file. Each such number has 64 bits in a reply."""
Record = dict[str, Any]
T = TypeVar("T")


class KeptPrograms(NamedTuple):
    """Programs as the file stores them."""

    living: list[Record]
    ended: list[Record]


def record(program: Program) -> Record:
    """Return a program as plain values for JSON."""
    found: Record = {
        "id": program.id,
        "name": program.name,
        "pid": program.pid,
        "start": program.start,
        "uid": program.uid,
        "gid": program.gid,
        "parent": program.parent,
        "limits": program.limits.facts(),
        "is_launched": program.is_launched,
        "began_ns": program.began_ns,
        "used": program.used.facts(),
    }
    if program.ended is not None:
        found["ended"] = [program.ended.status, program.ended.reason, program.ended.ns]
    return found


def save(path: Path, kept: KeptPrograms) -> None:
    """Write a new file in place of the old one."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps({"version": _VERSION, **kept._asdict()}), encoding="utf-8")
    temporary.replace(path)


def load(path: Path) -> tuple[list[Program], list[Program]]:
    """Return the living and the ended programs of the file. A missing or damaged file has none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != _VERSION:
            raise ValueError(f"its version is {found['version']!r}, and this is {_VERSION}")  # noqa: TRY301
        return [_program(each) for each in found["living"]], [_program(each) for each in found["ended"]]
    except FileNotFoundError:
        return [], []
    except (OSError, KeyError, TypeError, ValueError, RecursionError, Invalid) as error:
        log.warning("%s: the records of programs are ignored: %s", path, error)
        return [], []


def _program(found: Record) -> Program:
    number, name = (_checked(each, str) for each in (found["id"], found["name"]))
    program = Program(
        number,
        name,
        None if found["pid"] is None else _checked(found["pid"], int),
        _checked(found["start"], int),
        _checked(found["uid"], int),
        _checked(found["gid"], int),
        parent=None if found["parent"] is None else _checked(found["parent"], str),
        limits=ProgramLimits.read(found["limits"]),
        is_launched=_checked(found["is_launched"], bool),
        began_ns=_checked(found["began_ns"], int),
    )
    program.take_up(Used.read(found["used"]))
    if "ended" in found:
        status, reason, ns = found["ended"]
        status = None if status is None else _checked(status, int)
        program.ended = ProgramEnd(status, _checked(reason, str), _checked(ns, int))
    return program


def _checked(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    if isinstance(value, int) and not -_MAX_NUMBER <= value < _MAX_NUMBER:
        raise ValueError(f"{value!r} is no number of 64 bits")
    return value
