"""Rows of `symphony ps`: the launcher's programs, merged with the programs that the daemon knows."""

from __future__ import annotations

import dataclasses
import pwd
import time
from pathlib import Path
from typing import Any

import libsym as sym
from symphony.launcher.asking import client
from symphony.launcher.common.places import Places

Row = dict[str, Any]

OWN_NAME = "symphony"
"""Process name of Symphony's own commands. The daemon gets it from the kernel."""
_OF_LAUNCHER = ("program", "args", "cwd", "detached", "tty", "isolation", "created", "restarts")
"""Facts about a program that only its launcher knows."""


def rows(places: Places, socket: str, *, ended: bool) -> tuple[list[Row], sym.NotConnected | None]:
    """Return the programs in the order of their start, and the error if the daemon can't be reached, or None."""
    found = {each["id"]: {**each, "state": None, "call": None} for each in _of_launcher(places, ended=ended)}
    try:
        known = _of_daemon(socket, ended=ended)
    except sym.NotConnected as error:
        return list(found.values()), error
    for told in known:
        own = found.get(told["id"])
        if own is None:
            found[told["id"]] = dict.fromkeys(_OF_LAUNCHER) | told | {"created": told["started"]}
        elif own["status"] is None:
            own |= {name: told[name] for name in ("state", "call", "connections", "usage")}
    return sorted(found.values(), key=lambda each: float(each["created"])), None


def _of_launcher(places: Places, *, ended: bool) -> list[Row]:
    if not places.directory.exists():
        return []  # no launcher has ever run
    found: list[Row] = client.request(places, {"do": "ps", "all": ended})["programs"]
    return found


def _of_daemon(socket: str, *, ended: bool) -> list[Row]:
    """Return the daemon's facts about all programs that this user may see.
    This command is left out, and so are Symphony's own commands that have ended.
    """
    sym.connect(socket)
    try:
        me = sym.getpid()
        return [
            {name: value for name, value in dataclasses.asdict(each).items() if name != "extra"}
            for each in sym.programs(ended=ended)
            if each.pid != me and not (each.name == OWN_NAME and (each.ended is not None or not is_there(each.pid)))
        ]
    finally:
        sym.close()


def is_there(pid: int | None) -> bool:
    """Return whether a process exists. The daemon may learn of a process's end later."""
    return Path(f"/proc/{pid}").exists()


def lines(programs: list[Row]) -> list[str]:
    """Return the table of programs as lines of text."""
    rows = [("ID", "NAME", "PID", "USER", "AGE", "TOKENS", "ISOLATION", "STATUS", "PROGRAM"), *map(_cells, programs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = " ".join(f"{{:{side}{width}}}" for side, width in zip("<<><>><<", widths, strict=False))
    return [f"{form.format(*cells)} {words}" for *cells, words in rows]


def _cells(program: Row) -> tuple[str, ...]:
    return (
        program["id"],
        printable(program["name"]),
        str(program["pid"] or "-"),
        user_name(program["uid"]),
        _age(program["created"]),
        str(program["usage"].get("tokens", 0)),
        program["isolation"] or "-",
        _status(program),
        printable(" ".join([program["program"], *program["args"]])) if program["program"] else "(not of this launcher)",
    )


def printable(text: str) -> str:
    """Return text as one line of printable characters. The text may come from a program or another user."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _status(program: Row) -> str:
    if program["reason"] is not None:
        return f"{program['reason']} {'' if program['status'] is None else program['status']}".rstrip()
    if not program["pid"]:
        return "restarting"
    call = f" ({program['call']})" if program["call"] else ""
    return (program["state"] or "running") + call


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _age(since: float) -> str:
    seconds = max(0, int(time.time() - since))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
