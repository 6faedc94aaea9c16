"""`symphony trace`: record the scheduler's decisions, and show them later."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from symphony.commands.options import Commands, add_json, add_socket, socket_of

MAX_TRACE_S = 366 * 24 * 3600


def add_trace(commands: Commands) -> None:
    trace = commands.add_parser("trace", help="record what the scheduler decides, for a timeline")
    parts = trace.add_subparsers(required=True, metavar="WHAT")

    record = parts.add_parser("record", help="write a trace until Ctrl-C")
    add_socket(record)
    record.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("symphony.trace"), help="default: symphony.trace"
    )
    record.add_argument("--seconds", metavar="N", type=_seconds, help="end after so long")
    record.set_defaults(action=lambda args: _tracing().record_command(args, socket_of(args)))

    show = parts.add_parser("show", help="write a trace as a timeline that viewers open")
    show.add_argument("file", metavar="FILE", type=Path)
    show.add_argument("-o", "--output", metavar="OUT", type=Path, help="default: as FILE, with the suffix .json")
    show.set_defaults(action=lambda args: _tracing().show_command(args))

    dump = parts.add_parser("dump", help="print a trace, one JSON object a line")
    dump.add_argument("file", metavar="FILE", type=Path)
    dump.set_defaults(action=lambda args: _tracing().dump_command(args))

    summary = parts.add_parser("summary", help="print the totals of a trace")
    add_json(summary)
    summary.add_argument("file", metavar="FILE", type=Path)
    summary.set_defaults(action=lambda args: _tracing().summary_command(args))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MAX_TRACE_S:
        raise argparse.ArgumentTypeError(f"{text} seconds: give more than 0, and {MAX_TRACE_S} at most")
    return seconds


def _tracing() -> ModuleType:
    from symphony.traces import tracing  # noqa: PLC0415 - it imports numpy

    return tracing
