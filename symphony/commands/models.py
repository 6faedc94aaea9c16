"""`symphony model list | remove`: packed weights that the daemon keeps for its next start."""

from __future__ import annotations

import argparse
from types import ModuleType

from symphony.commands.options import Commands, add_json, add_socket, socket_of
from symphony.views.reports import counted, human_bytes


def add_models(commands: Commands) -> None:
    """Add the commands."""
    model = commands.add_parser("model", help="list or remove packed weights that are kept for the next start")
    parts = model.add_subparsers(required=True, metavar="WHAT")

    listed = parts.add_parser("list", help="list the files of packed weights")
    _add_cache(listed)
    add_json(listed)
    listed.set_defaults(action=_list)

    remove = parts.add_parser("remove", help="remove files of packed weights; the next start packs again")
    _add_cache(remove)
    remove.add_argument("names", metavar="FILE", nargs="*", help="name of a file, as list shows it")
    remove.add_argument("--unused", action="store_true", help="remove all files that no daemon uses")
    remove.set_defaults(action=_remove)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    add_socket(parser)
    parser.add_argument(
        "--weights-cache", metavar="DIR", help="the directory (default: the daemon's, or your own if no daemon answers)"
    )


def _kept_weights() -> ModuleType:
    from symphony.checks import kept_weights  # noqa: PLC0415 - it imports numpy

    return kept_weights


def _list(args: argparse.Namespace) -> int:
    kept = _kept_weights()
    directory = kept.cache_of(args.weights_cache, socket_of(args))
    files = kept.kept_files(directory)
    if args.json:
        print(kept.json_of(directory, files))
        return 0
    for line in kept.table_of(files):
        print(line)
    size = human_bytes(sum(file.num_bytes for file in files))
    print(f"{counted(len(files), 'file')} of {size} in {directory}")
    return 0


def _remove(args: argparse.Namespace) -> int:
    kept = _kept_weights()
    directory = kept.cache_of(args.weights_cache, socket_of(args))
    removed = kept.remove_files(directory, args.names, unused=args.unused)
    size = human_bytes(sum(file.num_bytes for file in removed))
    print(f"{counted(len(removed), 'file')} of {size} removed from {directory}")
    return 0
