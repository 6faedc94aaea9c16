"""`symphony fsck | scrub | doctor`: checks of the files on disk and of this machine."""

from __future__ import annotations

import argparse
import os
import sys

from symphony.checks.doctor import checks, print_report
from symphony.commands.options import Commands, add_json, add_socket, count, socket_of


def add_checks(commands: Commands) -> None:
    """Add the commands."""
    fsck = commands.add_parser("fsck", help="check the state on disk, and repair it")
    add_socket(fsck)
    add_json(fsck)
    state = fsck.add_mutually_exclusive_group()
    state.add_argument(
        "state",
        metavar="DIR",
        nargs="?",
        help="state directory that no daemon uses (default: ask the running daemon, or check your own state)",
    )
    state.add_argument("--state", metavar="DIR", dest="state_option", help="the same")
    state.add_argument(
        "--weights",
        metavar="DIR",
        nargs="?",
        const="",
        help="check packed weights in place of the state (default: the daemon's, or your own if no daemon answers)",
    )
    fsck.add_argument("--repair", action="store_true", help="mend what can be mended, and remove damaged parts")
    fsck.add_argument("--quick", action="store_true", help="do not read pages")
    fsck.set_defaults(action=_fsck)

    scrub = commands.add_parser("scrub", help="have the daemon read everything that it keeps on disk")
    add_socket(scrub)
    add_json(scrub)
    scrub.add_argument("--rate", metavar="SIZE", default="50M", help="bytes a second at most (default: 50M)")
    scrub.set_defaults(action=_scrub)

    doctor = commands.add_parser("doctor", help="check this machine, and say what to repair")
    add_socket(doctor)
    add_json(doctor)
    doctor.add_argument("--model", metavar="M", help="say what this model needs and how fast it is, and load nothing")
    doctor.add_argument("--context", metavar="N", type=count, help="with --model: entries whose KV is counted")
    doctor.set_defaults(action=_doctor)


def _fsck(args: argparse.Namespace) -> int:
    from symphony.checks.checking import fsck_command  # noqa: PLC0415 - it imports numpy and kvfs.durable

    args.state = args.state or args.state_option
    return fsck_command(args, socket_of(args))


def _scrub(args: argparse.Namespace) -> int:
    from symphony.checks.checking import scrub_command  # noqa: PLC0415 - as above

    return scrub_command(args, socket_of(args))


def _doctor(args: argparse.Namespace) -> int:
    if args.model is not None:
        from symphony.checks.model_fit import check_model_fit  # noqa: PLC0415 - it imports numpy and the decoder

        return print_report(check_model_fit(args.model, args.context), as_json=args.json)
    if args.context is not None:
        print("symphony doctor: --context needs --model", file=sys.stderr)
        return 2
    if args.socket:
        os.environ["SYMPHONY_SOCKET"] = str(socket_of(args))
    return print_report(checks(), as_json=args.json)
