"""The commands `run`, `ps`, `kill`, `logs`, `wait` and `attach`."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from libsym.channel.socket_path import find_socket
from symphony.launcher.asking import client, listing, terminal
from symphony.launcher.asking.hidden import hidden_line
from symphony.launcher.asking.session import Session
from symphony.launcher.common import confinement
from symphony.launcher.common.finding import does_without_sandbox, find_program, shipped_lines
from symphony.launcher.common.grants import parse_grant
from symphony.launcher.common.places import Places, Refused, find_places
from symphony.launcher.common.spec import NONE, RLIMITS, STANDARD

Message = dict[str, Any]


def places_of(socket: Path | None) -> Places:
    """Return the places of the launcher for the daemon at `socket`. None: the default socket."""
    return find_places(str((socket or find_socket()).absolute()))


def run_command(args: argparse.Namespace, socket: Path | None) -> int:
    if args.list or args.program is None:
        print("\n".join(shipped_lines()))
        return 0
    places = places_of(socket)
    spec = _spec(args)
    if not places.control.exists():
        client.check_daemon(places)
    hidden = hidden_line(spec["path"], spec["cwd"], spec["args"], spec["shows"]) if "shows" in spec else None
    if hidden is not None:
        print(f"symphony: {hidden}", file=sys.stderr)
    request = {"do": "run", "spec": spec, "detach": args.detach, "window": terminal.window()}
    with client.opened(places, request) as connection:
        try:
            program = client.answer(connection)
        except client.NoDaemonAnswer as error:
            raise client.no_daemon(places, str(error)) from None
        if args.detach:
            print(program["name"])
            return 0
        return Session(connection, sends=True, tty=spec["tty"]).run()


def _spec(args: argparse.Namespace) -> Message:
    """Return a request's description of the program, with this process's environment, directory and rlimits."""
    path, python = find_program(args.program, ".")
    if args.isolation is None:
        args.isolation = NONE if does_without_sandbox(path) else STANDARD
    cwd, venv = _directory(), args.venv and os.path.abspath(args.venv)  # noqa: PTH100 - text is needed
    env = confinement.environment(os.environ, variables(args), whole=args.isolation == NONE)
    limits = {"time": args.time, "memory": args.memory, "processes": args.processes}
    on_terminal = terminal.is_terminal(0) and terminal.is_terminal(1)
    mask = os.umask(0)
    os.umask(mask)
    return {
        "path": path,
        "python": python,
        "args": args.arguments,
        "env": env,
        "cwd": cwd,
        "isolation": args.isolation,
        "venv": venv,
        **_sandbox(args, path, cwd, env, venv),
        "name": args.name,
        "id": args.id,
        "limits": {**limits, "tokens": args.tokens, "pages": args.pages},
        "restart": args.restart,
        "has_input": not args.detach,
        "tty": args.tty or (on_terminal and not args.detach),
        "error_apart": not args.tty if args.detach else not terminal.same_place(1, 2),
        "umask": mask,
        "rlimits": {name: resource.getrlimit(getattr(resource, name)) for name in RLIMITS},
    }


def _sandbox(args: argparse.Namespace, path: str, cwd: str, env: dict[str, str], venv: str | None) -> Message:
    """Return the part of a request that describes the sandbox. Refused: the options contradict each other."""
    if venv is not None:
        confinement.packages_of(venv)
    binds, grants = confinement.binds(args.bind), [parse_grant(each) for each in args.allow_net]
    if args.isolation == NONE:
        if binds or grants:
            raise Refused("--bind and --allow-net open a sandbox, and --isolation none has none", 2)
        return {}
    shows, empty = confinement.shown_to(path, cwd, env.get("PYTHONPATH", ""))
    packages = [(venv, os.path.realpath(venv), False)] if venv else []
    return {"shows": [*shows, *packages, *binds], "home": confinement.home_of(env), "empty": empty, "allow_net": grants}


def variables(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the variables of the options --env and --env-json.
    A variable without a value gets its value in this process's environment.
    """
    given = [(name, os.environ.get(name, "") if value is None else value) for name, value in args.env]
    if args.env_json is not None:
        given += json.loads(Path(args.env_json).read_text(encoding="utf-8"))
    return given


def _directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - text is needed
    except OSError as error:
        raise Refused(f"this directory can't be named: {error.strerror}") from None


def ps_command(args: argparse.Namespace, socket: Path | None) -> int:
    daemon = socket or find_socket()
    programs, missing = listing.rows(places_of(daemon), str(daemon), ended=args.all)
    size = terminal.window(1)
    width = size[1] or None if size else None
    shown = (line[:width] for line in listing.lines(programs))
    print(json.dumps(programs, indent=2) if args.json else "\n".join(shown))
    if missing is None:
        return 0
    print(f"symphony: what the daemon knows of programs is missing: {missing}", file=sys.stderr)
    return 1


def kill_command(args: argparse.Namespace, socket: Path | None) -> int:
    """Send a signal to each program. Return the exit status of the last error, or 0."""
    status = 0
    for who in args.who:
        try:
            client.request(places_of(socket), {"do": "kill", "who": who, "signal": args.signal})
        except Refused as error:
            print(f"symphony: {error}", file=sys.stderr)
            status = error.status
    return status


def logs_command(args: argparse.Namespace, socket: Path | None) -> int:
    request = {"do": "logs", "who": args.who, "follow": args.follow}
    with client.opened(places_of(socket), request) as connection:
        client.answer(connection)
        Session(connection, sends=False, tty=False).run()
    return 0


def wait_command(args: argparse.Namespace, socket: Path | None) -> int:
    """Wait for programs and print their exit statuses. Return the status of the last program."""
    status = 0
    for who in args.who:
        program = client.request(places_of(socket), {"do": "wait", "who": who})["program"]
        status = program["status"]
        print(status if len(args.who) == 1 else f"{program['name']} {status}")
    return status


def attach_command(args: argparse.Namespace, socket: Path | None) -> int:
    with client.opened(places_of(socket), {"do": "attach", "who": args.who}) as connection:
        program = client.answer(connection)
        if terminal.window() is not None:
            print(f"symphony: {program['name']}; Ctrl-P Ctrl-Q leaves it", file=sys.stderr)
        return Session(connection, sends=True, tty=program["tty"]).run()


def signal_number(text: str) -> int:
    """Parse a signal: `TERM`, `SIGTERM` or `15`."""
    if text.isdigit() and int(text) in signal.valid_signals():
        return int(text)
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    try:
        return signal.Signals[name]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text} is no signal") from None
