"""The grammar of the commands on programs: run, ps, kill, logs, wait, attach."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from kvfs.base.sizes import parse_bytes
from libsym.errors import Invalid
from symphony.commands.options import Commands, add_json, add_socket, count, socket_of
from symphony.launcher.asking import commands

Action = Callable[[argparse.Namespace, Path | None], int]
_SECONDS = {"ms": 0.001, "s": 1, "": 1, "m": 60, "h": 3600, "d": 86400}


def add_program_commands(subparsers: Commands) -> None:
    """Add the commands."""

    def command(name: str, purpose: str, action: Action) -> argparse.ArgumentParser:
        parser = subparsers.add_parser(name, help=purpose)
        add_socket(parser)
        parser.set_defaults(action=lambda args: action(args, socket_of(args)))
        return parser

    add_run_options(command("run", "run a program beside the model", _run))

    ps = command("ps", "list your programs", _ps)
    ps.add_argument("-a", "--all", action="store_true", help="list programs that have ended, too")
    ps.add_argument("--fleet", action="store_true", help="list the programs on all machines of the fleet")
    add_json(ps)

    kill = command("kill", "send a signal to programs", _by_machine(commands.kill_command, "kill"))
    kill.add_argument("-s", "--signal", type=commands.signal_number, default=15, metavar="SIGNAL", help="default: TERM")
    kill.add_argument("who", nargs="+", metavar="PROGRAM", help="a name, an id or a pid")

    logs = command("logs", "what a program wrote", _by_machine(commands.logs_command, "logs"))
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the program ends")
    logs.add_argument("who", metavar="PROGRAM")

    wait = command("wait", "return when programs have ended, and print how", _by_machine(commands.wait_command, "wait"))
    wait.add_argument("who", nargs="+", metavar="PROGRAM")

    attach = command("attach", "have a running program in this terminal", commands.attach_command)
    attach.add_argument("who", metavar="PROGRAM")


def add_run_options(run: argparse.ArgumentParser) -> None:
    """Add the options of `run`, which stand before a program's own arguments."""
    run.add_argument("-d", "--detach", action="store_true", help="print its name, and leave it running")
    run.add_argument("-t", "--tty", action="store_true", help="give it a terminal, even if this command has none")
    run.add_argument("--name", help="its name in ps (default: the name of its file)")
    run.add_argument(
        "--isolation",
        choices=("standard", "none"),
        help="standard: in a sandbox (the default); none: with all your rights (the default of a gateway)",
    )
    run.add_argument(
        "--bind",
        action="append",
        default=[],
        metavar="PATH[:ro]",
        help="let it write to a file or directory, or with :ro only read it",
    )
    run.add_argument(
        "--allow-net", action="append", default=[], metavar="HOST:PORT", help="let it connect there by TCP"
    )
    run.add_argument("--venv", metavar="DIR", help="a virtual environment whose packages it has")
    run.add_argument(
        "-e",
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="K[=V]",
        help="set a variable, or pass it on",
    )
    run.add_argument("--time", type=_seconds, metavar="TIME", help="end it after so long, like 10s, 5m, 2h")
    run.add_argument("--memory", type=_bytes, metavar="SIZE", help="end it when its processes have more, like 512M")
    run.add_argument("--processes", type=count, metavar="N", help="end it when it has more than N processes")
    run.add_argument("--tokens", type=count, metavar="N", help="end it when it has computed more than N tokens")
    run.add_argument("--pages", type=count, metavar="N", help="end it when it holds more than N pages")
    run.add_argument(
        "--restart", default="no", metavar="POLICY", help="start it again when it failed: no, on-failure, on-failure:N"
    )
    run.add_argument("--fleet", action="store_true", help="run it on the best machine of the fleet")
    run.add_argument("--on", metavar="MACHINE", help="run it on this machine of the fleet")
    run.add_argument(
        "--near", action="append", default=[], metavar="FILE", help="a file on the mount that it uses, for --fleet"
    )
    run.add_argument("--id", help=argparse.SUPPRESS)  # for commands on other machines, as the next one
    run.add_argument("--env-json", metavar="FILE", help=argparse.SUPPRESS)  # so that no value is in a command line
    run.add_argument("--list", action="store_true", help="list the programs that ship with Symphony")
    run.add_argument("program", metavar="PROG", nargs="?", help="a file, or the name of a program that ships")
    run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)


def _run(args: argparse.Namespace, socket: Path | None) -> int:
    if args.near and (not args.fleet or args.on):
        raise Invalid("--near chooses the machine for --fleet: say --fleet, and leave --on out")
    if (args.fleet or args.on) and args.program is not None and not args.list:
        from symphony.commands.elsewhere import run_in_fleet  # noqa: PLC0415 - only fleets need it

        return run_in_fleet(args, socket)
    return commands.run_command(args, socket)


def _ps(args: argparse.Namespace, socket: Path | None) -> int:
    if not args.fleet:
        return commands.ps_command(args, socket)
    from symphony.commands.elsewhere import ps_in_fleet  # noqa: PLC0415 - only fleets need it

    return ps_in_fleet(args, socket)


def _by_machine(action: Action, name: str) -> Action:
    """Return an action that also takes programs of other machines, MACHINE:NAME. `name`: the command."""

    def act(args: argparse.Namespace, socket: Path | None) -> int:
        if not any(":" in each for each in ([args.who] if isinstance(args.who, str) else args.who)):
            return action(args, socket)
        from symphony.commands.elsewhere import act_elsewhere  # noqa: PLC0415 - only fleets need it

        return act_elsewhere(name, args)

    return act


def _variable(text: str) -> tuple[str, str | None]:
    """Parse NAME=VALUE. NAME alone gives None: the program gets the variable of this command's environment."""
    name, equals, value = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text} sets nothing: write NAME=VALUE, or NAME to pass it on")
    return name, value if equals else None


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smhd]?)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is no time: write 10s, 5m, 2h or a number of seconds")
    return float(found[1]) * _SECONDS[found[2]]


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except Invalid as error:
        raise argparse.ArgumentTypeError(str(error)) from None
