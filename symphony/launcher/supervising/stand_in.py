"""Stand-in: a process of this machine for a program that a program has spawned on another machine.

A stand-in is `symphony run --on MACHINE`. It ends with the program there and has its output and status, and it passes
signals on. So `wait`, `kill`, `ps` and `logs` need to know nothing of other machines. It runs without a sandbox, since
it asks Ray. The program there has the isolation, the granted hosts and the limits of its parent. The parent chooses
what the stand-in sends, and nothing of what it reads: the program's text comes from the parent, never from a path.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from ipaddress import ip_address
from pathlib import Path

from symphony.launcher.common.finding import shipped
from symphony.launcher.common.places import Refused
from symphony.launcher.common.spec import MAX_NAME, NONE, NOT_IN_NAMES, Spec, checked
from symphony.launcher.common.statuses import NOT_FOUND
from symphony.launcher.supervising.daemon_link import Message

SYMPHONY = ("-P", "-m", "symphony.cli")
MEMORY_BYTES = 512 << 20
"""Limit of a stand-in's memory. Ray takes 95 MB in it, on a machine of two cores."""


def stand_in(parent: Spec, request: Message, directory: Path, ident: str) -> Spec:
    """Return the specification of a stand-in. `directory`: for the program's variables, and for its text, if the
    program does not ship. `ident`: id of the program there.
    Refused: there is no such program, or the request is invalid.
    """
    program = request["program"]
    if "source" in request:
        program = _kept(directory, NOT_IN_NAMES.sub("_", Path(program).stem)[:MAX_NAME] + ".py", request["source"])
    elif program not in shipped():
        raise Refused(f"no program {program}: it is no file, and Symphony ships none of this name", NOT_FOUND)
    wanted = {"limits": request.get("limits"), "name": request.get("name"), "restart": request.get("restart")}
    asked = checked({"path": program, "python": True, "args": request.get("args") or [], **wanted})
    limits = dataclasses.asdict(asked.limits.within(parent.limits))
    if limits.pop("page_seconds") is not None:
        raise Refused("a program on another machine takes no limit of page_seconds")
    for host, _ in parent.allow_net:
        if _is_of_one_machine(host):
            raise Refused(f"a program on another machine can't have the grant of {host}, which is this machine")
    variables = request.get("env") or {}
    if parent.is_isolated and "PYTHONPATH" in variables:  # `symphony run` there shows these directories to the program
        raise Refused("a program in a sandbox can't choose PYTHONPATH on another machine")
    options = {**limits, "on": request["on"], "isolation": parent.isolation, "restart": request.get("restart")}
    words = [f"--{name}={_word(value)}" for name, value in options.items() if value is not None]
    words += [f"--id={ident}", f"--env-json={_kept(directory, 'env.json', json.dumps([*variables.items()]))}"]
    words += [f"--allow-net={f'[{host}]' if ':' in host else host}:{port}" for host, port in parent.allow_net]
    words += [f"--name={asked.name}"] if asked.name else []
    return _command(
        ["run", *words, program, *asked.args],
        name=asked.name or NOT_IN_NAMES.sub("_", Path(program).stem).lstrip(".+-")[:MAX_NAME] or None,
        rlimits=parent.rlimits,
        stands_for=f"{request['on']}:{ident}",
    )


def killer(stand_in: Spec) -> Spec:
    """Return the specification of a command that kills the program there, after its stand-in has ended before it."""
    assert stand_in.stands_for is not None
    words = ["kill", "--signal", "KILL", "--", stand_in.stands_for]
    more = {"stands_for": stand_in.stands_for, "restart": "on-failure"}  # the stand-in's place, and further attempts
    return _command(words, name=f"kill-{stand_in.name}"[:MAX_NAME], **more)


def _command(words: list[str], **more: object) -> Spec:
    """Return the specification of a command of Symphony, outside of sandboxes, with the launcher's environment."""
    return checked(
        {
            "path": sys.executable,
            "python": False,
            "args": [*SYMPHONY, *words],
            "env": dict(os.environ),
            "isolation": NONE,
            "limits": {"memory": MEMORY_BYTES},
            "umask": 0o077,
            "has_input": False,
            **more,
        }
    )


def _kept(directory: Path, name: str, text: str) -> str:
    """Write a file that the stand-in sends, and return its path. Refused: it can't be written."""
    file = directory / name
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refused(f"the program was not kept for sending: {error.strerror}") from None
    return str(file)


def _is_of_one_machine(host: str) -> bool:
    """Return whether a host is another one on each machine."""
    try:
        found = ip_address(host)
    except ValueError:
        return f".{host.lower().rstrip('.')}".endswith(".localhost")
    return found.is_loopback or found.is_link_local or found.is_unspecified


def _word(value: object) -> object:
    """Return an option's value as `symphony run` reads it: no exponents, no fractions of whole numbers."""
    return f"{value:f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
