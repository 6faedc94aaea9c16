"""Options that several commands share (`--socket`, `--json`, intervals), and the type of subparsers."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypeAlias

import libsym
from symphony.commands.parser import Parser

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # noqa: SLF001 - it has no other name
"""Type that `add_subparsers` returns. The type is quoted, since its class is not generic at run time."""


def add_socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's socket (default: SYMPHONY_SOCKET, or the user's socket)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def socket_of(args: argparse.Namespace) -> Path | None:
    return Path(args.socket).absolute() if args.socket else None


def connect(args: argparse.Namespace) -> None:
    """Connect to the daemon that the command line names."""
    socket = socket_of(args)
    libsym.connect(str(socket) if socket else None)


def on_mount(path: str | None, mount: str) -> str:
    """Return a path for the daemon.
    A relative path begins at the working directory if that is on the mount, else at the root of the mount.
    """
    here = Path.cwd()
    return os.path.normpath(here / path) if path and here.is_relative_to(Path(mount).resolve()) else path or "."


MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 86_400.0
MAX_DIGITS = 18
"""Digits of the largest number on a command line: it fits into 64 bits."""


def interval(text: str) -> float:
    """Parse the time between two samples, in seconds."""
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds") from None
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text} seconds: {MIN_INTERVAL_S:g} at least, and a day at most")
    return seconds


def count(text: str) -> int:
    """Parse a number above 0."""
    if not text.isdecimal() or len(text) > MAX_DIGITS or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]} is no number above 0")
    return int(text)
