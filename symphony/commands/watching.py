"""`symphony top`: watch programs, files and steps on a terminal."""

from __future__ import annotations

import argparse
import sys

from libsym.errors import NotSupported
from symphony.commands.options import Commands, add_socket, interval, socket_of
from symphony.views.watching import can_paint


def add_top(commands: Commands) -> None:
    top = commands.add_parser("top", help="watch programs, files and steps on a terminal")
    add_socket(top)
    top.add_argument("--interval", metavar="SECONDS", type=interval, default=1.0, help="between samples (default: 1)")
    top.set_defaults(action=_top)


def _top(args: argparse.Namespace) -> int:
    if not (sys.stdin.isatty() and can_paint()):
        raise NotSupported("symphony top needs a terminal; without one there is symphony stat --watch")
    from symphony.views.top.app import Top  # noqa: PLC0415 - it imports textual, which only this command needs
    from symphony.views.top.sampling import Daemon  # noqa: PLC0415 - only this command needs it

    top = Top(Daemon(socket_of(args)), args.interval)
    top.run()
    return top.return_code or 0
