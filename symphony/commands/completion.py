"""`symphony completion`: what completes these commands in a shell."""

from __future__ import annotations

import argparse
from types import ModuleType

from symphony.commands.options import Commands, add_socket, socket_of

SHELLS = ("bash", "zsh", "fish")
KINDS = ("programs", "all-programs", "shipped", "kv", "topics", "options")


def add_completion(commands: Commands, whole: argparse.ArgumentParser) -> None:
    """`whole`: the grammar that is completed."""
    parser = commands.add_parser("completion", help="print what completes these commands in a shell")
    add_socket(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("shell", nargs="?", choices=SHELLS, help="the shell to print it for")
    which.add_argument("--names", choices=KINDS, help="print names, a line each: what the scripts ask for")
    parser.add_argument(
        "--line", metavar="WORD", nargs=argparse.REMAINDER, default=[], help="of options: the words behind run so far"
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
    from symphony import completing  # noqa: PLC0415 - shtab, which base installations lack

    return completing
