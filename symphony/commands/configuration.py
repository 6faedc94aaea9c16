"""`symphony config check | show` and `symphony reload`: check, show or reload the configuration of a daemon."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import libsym
from libsym.errors import Invalid, NoAccess, SymError, TimedOut
from symphony.commands.options import Commands, add_json, add_socket, connect
from symphony.settings.config_file import read_config_file
from symphony.settings.loading import overlaid, placed, problems_of

RELOAD_TIMEOUT_S = 30.0
"""Time limit for the daemon to read its file. The daemon's trio thread may be busy."""
_PAUSE_S = 0.02


def add_configuration(commands: Commands) -> None:
    """Add the commands."""
    config = commands.add_parser("config", help="check a configuration file, or show its values and the defaults")
    parts = config.add_subparsers(required=True, metavar="WHAT")

    check = parts.add_parser("check", help="say what is wrong in a file, and in which line")
    _add_file(check)
    check.set_defaults(action=_check)

    show = parts.add_parser("show", help="print every key with its value, and where that is from")
    add_json(show)
    _add_file(show)
    show.set_defaults(action=_show)

    reload = commands.add_parser("reload", help="have the daemon read its configuration again, and say what changed")
    add_socket(reload)
    reload.set_defaults(action=_reload)


def _add_file(parser: argparse.ArgumentParser) -> None:
    named = parser.add_mutually_exclusive_group()
    named.add_argument("file", metavar="FILE", type=Path, nargs="?", help="default: /etc/symphony/symphony.toml")
    named.add_argument("--config", metavar="FILE", type=Path, help="the same as FILE, named as in `symphony serve`")


def _file(args: argparse.Namespace) -> Path:
    """Return the file that the command line names. The default is the user's file if it exists, else the machine's."""
    if named := args.file or args.config:
        return Path(named)
    directory = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    own = directory / "symphony" / "symphony.toml"
    return own if os.geteuid() != 0 and own.exists() else Path("/etc/symphony/symphony.toml")


def _check(args: argparse.Namespace) -> int:
    file = read_config_file(_file(args))
    problems = problems_of(file)
    for problem in problems:
        print(placed(problem, file), file=sys.stderr)
    if not problems:
        print(f"{file.path}: {len(file.values)} keys, all right")
    return 1 if problems else 0


def _show(args: argparse.Namespace) -> int:
    file = read_config_file(_file(args))
    config = overlaid(file, {})
    values = {key: _plain(value) for key, value in asdict(config).items()}
    places = {key: file.place_of((key,)) if key in file.values else "default" for key in values}
    if args.json:
        print(json.dumps({key: {"value": values[key], "from": places[key]} for key in values}, indent=2))
    else:
        width = max(len(field.name) for field in fields(config))
        for key, value in values.items():
            print(f"{key:{width}} = {json.dumps(value):24} # {places[key]}")
    return 0


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: a path becomes text."""
    return str(value) if isinstance(value, Path) else value


def _reload(args: argparse.Namespace) -> int:
    connect(args)
    before = _told()
    if before["file"] is None:
        raise Invalid("the daemon has no configuration file: start it with --config")
    try:
        os.kill(libsym.daemon_stat()["pid"], signal.SIGHUP)
    except PermissionError:
        raise NoAccess("the daemon is another user's: run symphony reload as that user, or as root") from None
    after = _wait_for_more(before["reloads"])
    if after["error"] is not None:
        raise SymError(f"nothing is changed: {after['error']}")
    print(f"changed: {', '.join(after['changed']) or 'nothing'}")
    if after["needs_restart"]:
        print(f"needs a restart: {', '.join(after['needs_restart'])}")
    return 0


def _wait_for_more(reloads: int) -> Mapping[str, Any]:
    """Wait for the daemon's next reload, and return its outcome. A signal has no answer, so the daemon is polled."""
    deadline_s = time.monotonic() + RELOAD_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if (told := _told())["reloads"] > reloads:
            return told
        time.sleep(_PAUSE_S)
    raise TimedOut(f"the daemon has not read its configuration again in {RELOAD_TIMEOUT_S:g} s: see its log")


def _told() -> Mapping[str, Any]:
    told: Mapping[str, Any] = libsym.daemon_stat()["config"]
    return told
