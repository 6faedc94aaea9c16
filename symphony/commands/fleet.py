"""`symphony fleet keys | fetch`: daemons on several machines."""

from __future__ import annotations

import argparse
from pathlib import Path

import libsym
from symphony.commands.options import Commands, add_socket, connect


def add_fleet(commands: Commands) -> None:
    """Add the commands."""
    fleet = commands.add_parser("fleet", help="use files of daemons on other machines")
    parts = fleet.add_subparsers(required=True, metavar="WHAT")

    keys = parts.add_parser("keys", help="make the certificates by which daemons know each other")
    keys.add_argument("directory", metavar="DIR", type=Path, help="directory of the fleet's authority")
    keys.add_argument("names", metavar="NAME", nargs="+", help="name of a daemon, which gets a directory below DIR")
    keys.set_defaults(action=_keys)

    fetch = parts.add_parser("fetch", help="copy a file of another daemon")
    add_socket(fetch)
    fetch.add_argument("peer", metavar="PEER", help="name of the other daemon")
    fetch.add_argument("path", metavar="FILE", help="file on the mount of the other daemon")
    fetch.add_argument("new", metavar="NEW", nargs="?", help="name of the copy (default: the name of FILE)")
    fetch.set_defaults(action=_fetch)


def _keys(args: argparse.Namespace) -> int:
    from symphony.fleet.keys import make_keys  # noqa: PLC0415 - a package that few installations have

    make_keys(args.directory, args.names)
    return 0


def _fetch(args: argparse.Namespace) -> int:
    connect(args)
    libsym.kv_fetch(args.peer, args.path, Path(args.path).name if args.new is None else args.new).close()
    return 0
