"""`symphony completion`: the script that completes commands in a shell."""

from __future__ import annotations

import argparse
from types import ModuleType

from symphony.commands.options import Commands, add_socket, socket_of

SHELLS = ("bash", "zsh", "fish")
KINDS = ("programs", "all-programs", "shipped", "kv", "topics", "options")


def add_completion(commands: Commands, whole: argparse.ArgumentParser) -> None:
    """Add the command. `whole`: the parser of the whole command line, for which the scripts are made."""
    parser = commands.add_parser("completion", help="print a script that completes these commands in a shell")
    add_socket(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("shell", nargs="?", choices=SHELLS, help="the shell to print it for")
    which.add_argument("--names", choices=KINDS, help="print names, one a line, for these scripts")
    parser.add_argument(
        "--line",
        metavar="WORD",
        nargs=argparse.REMAINDER,
        default=[],
        help="with --names options: the words after `symphony run` so far",
    )
    parser.set_defaults(action=lambda args: _completion(args, whole))


def _completion(args: argparse.Namespace, whole: argparse.ArgumentParser) -> int:
    if args.names:
        completing = _completing()
        of_program = args.names == "options"
        found = completing.options_of(args.line) if of_program else completing.names(args.names, socket_of(args))
        for name in found:
            print(name)
    else:
        print(_completing().script(args.shell, whole))
    return 0


def _completing() -> ModuleType:
    from symphony.commands import completing  # noqa: PLC0415 - it uses shtab, which base installations lack

    return completing
