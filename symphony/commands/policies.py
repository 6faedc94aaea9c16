"""`symphony policy`: compare tier policies on a recorded workload, without a daemon."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from kvfs.base.sizes import parse_bytes
from libsym.errors import Invalid
from symphony.commands.options import Commands, add_json


def add_policy(commands: Commands) -> None:
    policy = commands.add_parser("policy", help="compare policies for the pages that stay in memory, on a trace")
    parts = policy.add_subparsers(required=True, metavar="WHAT")

    replay = parts.add_parser("replay", help="replay a trace under several policies, and compare them")
    replay.add_argument(
        "trace", metavar="TRACE", type=Path, help="a trace from `symphony trace record` or scripts/traces"
    )
    replay.add_argument(
        "--policy",
        metavar="NAME|FILE",
        nargs="+",
        action="extend",
        help="cost, lru, ttl, idle, none (no tiers), or a file with a function rank (default: all five)",
    )
    replay.add_argument(
        "--memory",
        metavar="BYTES|N%",
        type=_memory,
        default="25%",
        help="memory for KV; N%%: share of the peak use (default: 25%%)",
    )
    replay.add_argument("--cost", metavar="NAME|FILE", default="cpu", help="cpu, h100 (modelled), or a costs.json")
    replay.add_argument(
        "--disk-rate",
        metavar="BYTES",
        type=_bytes,
        help="rate of the disk, for reads and for writes, in bytes a second",
    )
    replay.add_argument("--plot", metavar="FILE", type=Path, help="draw the comparison, too, as SVG")
    add_json(replay)
    replay.set_defaults(action=lambda args: _replay().replay_command(args))


def _memory(text: str) -> tuple[int | None, float | None]:
    """Parse a size into `(bytes, None)`, or a percentage into `(None, share)`."""
    if not text.endswith("%"):
        return _bytes(text), None
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text}: give more than 0%, and 100% at most")
    return None, share


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except Invalid as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _replay() -> ModuleType:
    from symphony.policy import replay  # noqa: PLC0415 - it imports numpy

    return replay
