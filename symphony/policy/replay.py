"""`symphony policy replay`: replay a trace under several policies, and compare them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from kvfs.tiers.loading import NAMES
from libsym.errors import SymError
from scheduler.trace.file import read_trace
from symphony.policy.comparing import NONE, as_json, compare, policies, table
from symphony.policy.machine import machine_of
from symphony.policy.plot import bars
from symphony.policy.workload import workload_of


def replay_command(args: argparse.Namespace) -> int:
    """Print the comparison of policies on a trace. With `--plot`, write the picture to that file."""
    ranks = policies(list(dict.fromkeys(args.policy or [NONE, *reversed(NAMES)])))
    try:
        trace = read_trace(args.trace)
    except SymError:
        raise
    except OSError as error:
        raise SymError(f"{args.trace}: {error.strerror or error}", error.errno) from None
    if trace.torn_at is not None:
        print(
            f"symphony: {args.trace} is torn at byte {trace.torn_at:,}: what came before is replayed", file=sys.stderr
        )
    machine = machine_of(args.cost, trace.header)
    if args.disk_rate:
        machine = replace(machine, read_bytes_s=float(args.disk_rate), write_bytes_s=float(args.disk_rate))
    memory_bytes, share = args.memory
    found = compare(workload_of(trace), machine, ranks, memory_bytes, share)
    told = as_json(found)
    print(json.dumps(told, indent=2) if args.json else "\n".join(table(found)))
    if args.plot:
        _write(args.plot, bars(told["policies"], f"{args.trace.name}: policies of the tiers", found.machine.about))
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SymError(f"{path}: {error.strerror or error}", error.errno) from None
