"""The command line `symphony COMMAND`. Each group of commands has a module in symphony.commands."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence

from libsym.errors import SymError
from symphony import __version__
from symphony.checks.installed import what_to_install
from symphony.commands.asking import add_questions
from symphony.commands.beginning import begin
from symphony.commands.checks import add_checks
from symphony.commands.completion import add_completion
from symphony.commands.configuration import add_configuration
from symphony.commands.fleet import add_fleet
from symphony.commands.manual import add_help
from symphony.commands.models import add_models
from symphony.commands.parser import Parser
from symphony.commands.policies import add_policy
from symphony.commands.programs import add_program_commands
from symphony.commands.serving import add_serve
from symphony.commands.traces import add_trace
from symphony.commands.watching import add_top
from symphony.launcher.asking.listing import OWN_NAME
from symphony.launcher.common.places import Refused
from symphony.launcher.machine.system import name_process


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `symphony` command."""
    _open_closed_streams()
    name_process(OWN_NAME)  # else a process of `python -m symphony` would have the interpreter's name
    parser = build_parser()
    args = parser.parse_args(argv)
    action: Callable[[argparse.Namespace], int] = args.action
    try:
        status = action(args)
        print(end="", flush=True)
    except SymError as error:
        print(f"symphony: {error}", file=sys.stderr)
        return 1
    except Refused as refused:
        print(f"symphony: {refused}", file=sys.stderr)
        return refused.status
    except ImportError as error:
        print(f"symphony: {what_to_install(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        _drop_output()  # as `head` closes a pipe
        return 1
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} or error.filename is not None:
            raise
        print(f"symphony: the output can't be written: {error.strerror}", file=sys.stderr)
        _drop_output()
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _drop_output() -> None:
    """Send output that is still buffered nowhere, so that the interpreter's last flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Open closed standard streams to /dev/null. Else the first socket would take the number of a standard stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="symphony", description="An operating system for LLM inference programs.")
    parser.add_argument("--version", action="version", version=f"symphony {__version__}")
    parser.set_defaults(action=begin)
    commands = parser.add_subparsers(metavar="COMMAND")
    add_serve(commands)
    add_configuration(commands)
    add_program_commands(commands)
    add_questions(commands)
    add_top(commands)
    add_checks(commands)
    add_models(commands)
    add_trace(commands)
    add_fleet(commands)
    add_policy(commands)
    add_help(commands)
    add_completion(commands, parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
