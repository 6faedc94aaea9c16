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
    top.add_argument("--fleet", action="store_true", help="watch the programs and machines of the fleet")
    top.add_argument("--json", action="store_true", help="print each sample as a line of JSON for scripts, instead")
    top.set_defaults(action=_top)


def _top(args: argparse.Namespace) -> int:
    from symphony.views.top.sampling import Daemon  # noqa: PLC0415 - only this command needs it

    daemon = Daemon(socket_of(args))
    if args.json and not args.fleet:
        from symphony.views.top.lines import print_samples  # noqa: PLC0415 - only this command needs it

        print_samples(daemon, args.interval)
    if args.fleet:
        from symphony.commands.fleet_samples import print_fleet, require_fleet  # noqa: PLC0415 - only fleets need it

        require_fleet(daemon)
        if args.json:
            print_fleet(daemon, args.interval)
    if not (sys.stdin.isatty() and can_paint()):
        raise NotSupported("symphony top needs a terminal; without one there are symphony top --json and stat --watch")
    from symphony.views.top.app import Tables, Top  # noqa: PLC0415 - it imports textual, which the base lacks
    from symphony.views.top.fleet import FleetTop  # noqa: PLC0415 - the same

    top: Tables = FleetTop(daemon.socket, args.interval) if args.fleet else Top(daemon, args.interval)
    top.run()
    return top.return_code or 0
