"""`symphony help`: the manual of this installation."""

from __future__ import annotations

import argparse

from symphony.commands.options import Commands


def add_help(commands: Commands) -> None:
    helped = commands.add_parser("help", help="list commands and topics, or say what the manual has on one")
    helped.add_argument(
        "topic", metavar="TOPIC", nargs="*", help="a command, call, program, key or any words (default: list topics)"
    )
    helped.set_defaults(action=_help)


def _help(args: argparse.Namespace) -> int:
    from symphony.manuals import manual  # noqa: PLC0415 - it imports difflib and subprocess, which few commands need

    pages = manual.find_pages(manual.directories())
    if not args.topic:
        print("\n".join(manual.listing(pages)))
        return 0
    found = manual.answer(pages, args.topic)
    if isinstance(found, str):
        print(found)
    else:
        manual.show(found)
    return 0
