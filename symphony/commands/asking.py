"""`symphony stat | sync | du`: questions to a daemon."""

from __future__ import annotations

import argparse
import json

import libsym
from symphony.commands.options import Commands, add_json, add_socket, connect, interval, on_mount
from symphony.views.reports import disk_lines, du_lines, stat_lines
from symphony.views.watching import watch


def add_questions(commands: Commands) -> None:
    """Add the commands."""
    stat = commands.add_parser("stat", help="what the daemon is doing")
    add_socket(stat)
    add_json(stat)
    stat.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        const=1.0,
        type=interval,
        help="show it again and again, until Ctrl-C (default: each second)",
    )
    stat.set_defaults(action=_stat)

    sync = commands.add_parser("sync", help="return when everything on the mount would survive a power cut")
    add_socket(sync)
    sync.set_defaults(action=_sync)

    du = commands.add_parser("du", help="what files own alone and what they share")
    add_socket(du)
    add_json(du)
    du.add_argument("path", nargs="?", help="a file or directory of the mount (default: all of it)")
    du.add_argument("--disk", action="store_true", help="what files take on disk, instead")
    du.add_argument("--by-model", action="store_true", help="the sum of each model's files, instead of each file")
    du.set_defaults(action=_du)


def _stat(args: argparse.Namespace) -> int:
    connect(args)
    if args.watch is not None:
        return watch(lambda: connect(args), args.watch, as_json=args.json)
    info = libsym.daemon_stat()
    print(json.dumps(info, indent=2) if args.json else "\n".join(stat_lines(info)))
    return 0


def _sync(args: argparse.Namespace) -> int:
    connect(args)
    libsym.kv_sync()
    return 0


def _du(args: argparse.Namespace) -> int:
    connect(args)
    info = libsym.daemon_stat()
    usage = libsym.kv_du(on_mount(args.path, info["mount"]), by_model=args.by_model)
    what = "MODEL" if args.by_model else "PATH"
    lines = disk_lines(usage, what) if args.disk else du_lines(usage, info["page_bytes"], what)
    print(json.dumps(usage, indent=2) if args.json else "\n".join(lines))
    return 0
