"""`symphony help`: the manual of this very Symphony."""

from __future__ import annotations

import argparse

from symphony.commands.options import Commands


def add_help(commands: Commands) -> None:
    helped = commands.add_parser("help", help="list commands and topics, or show the page of one")
    helped.add_argument("topic", metavar="TOPIC", nargs="?", help="a command, or another topic (default: list them)")
    helped.set_defaults(action=_help)


def _help(args: argparse.Namespace) -> int:
    from symphony import manual  # noqa: PLC0415 - difflib and subprocess, which few commands need

    pages = manual.find_pages(manual.directories())
    if args.topic is None:
        print("\n".join(manual.listing(pages)))
    else:
        manual.show(manual.find_page(pages, args.topic))
    return 0
