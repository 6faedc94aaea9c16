"""`symphony trace`: record the scheduler's decisions, and show them."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import libsym
from libsym.calls.trace import DaemonTrace
from libsym.errors import Exists, Invalid, SymError
from scheduler.trace.file import Trace, TraceReader, TraceWriter, read_trace
from scheduler.trace.records import NO_DEADLINE, VERSION, Block, BlockKind, CallKind
from symphony.traces.trace_calls import UNKNOWN, calls_of, span_ns
from symphony.traces.trace_events import text_of
from symphony.views.reports import human_bytes

_NAMES = {
    BlockKind.ARRIVALS: "arrival",
    BlockKind.ANSWERS: "answer",
    BlockKind.STEPS: "step",
    BlockKind.LOST: "lost",
    BlockKind.FILES: "file",
}
_PLACES = {"first_account", "num_accounts", "first_seat", "reserved"}
"""Fields that only structure the file, and say nothing about calls or steps."""


def record_command(args: argparse.Namespace, socket: Path | None) -> int:
    """Record until Ctrl-C, SIGTERM, or the end of `--seconds`.
    A second Ctrl-C does not wait for records that are in flight.
    """
    libsym.connect(str(socket) if socket else None)
    trace = DaemonTrace(args.seconds, VERSION)  # first: a refusal must not truncate an existing file
    counts = dict.fromkeys(BlockKind, 0)
    try:
        with _file_errors(args.output), _new_file(args.output) as file:
            writer = TraceWriter(file, trace.header)

            def take(kind: int, num_records: int, num_details: int, data: bytes) -> None:
                block = Block.parse(BlockKind(kind), num_records, num_details, data)
                counts[block.kind] += int(block.records["num_records"].sum() if kind == BlockKind.LOST else num_records)
                writer.add(block)

            with _stopped_by_signals(trace.stop):
                trace.read(take)
    finally:
        trace.close()
    size = human_bytes(writer.num_bytes)
    what = f"{counts[BlockKind.STEPS]:,} steps, {counts[BlockKind.ARRIVALS]:,} calls, {size}"
    print(f"{args.output}: {what}", file=sys.stderr)  # standard output may be the trace's file
    if counts[BlockKind.LOST]:
        print(
            f"symphony: {counts[BlockKind.LOST]:,} records were lost: they came too fast to be written", file=sys.stderr
        )
    return 0


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM, and restore the former handlers for the next signal."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stopped(_number: int, _frame: object) -> None:
        restore()
        stop()

    for number in before:
        signal.signal(number, stopped)
    try:
        yield
    finally:
        restore()


def _new_file(path: Path) -> BinaryIO:
    """Create a file that only its owner may read, since a trace tells what users' programs did, and when."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    return os.fdopen(fd, "wb")


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a SymError that names the file."""
    try:
        yield
    except SymError:
        raise
    except OSError as error:
        raise SymError(f"{path}: {error.strerror or error}", error.errno) from None


def show_command(args: argparse.Namespace) -> int:
    """Write the timeline of a trace to a file, and print the file's name.
    Without `--output`, the name is the trace's with the suffix .json, and the command fails if that file exists.
    """
    trace = _read(args.file)
    output = args.output or args.file.with_suffix(".json")
    if output.exists() and output.samefile(args.file):
        raise Invalid(f"{output} is the trace itself: give the timeline another name with -o")
    if output.exists() and not args.output:
        raise Exists(f"{output} exists: name a file with -o, which is replaced if it exists")
    with _file_errors(output), _new_file(output) as file:
        file.writelines(piece.encode() for piece in text_of(trace, args.file.name))
    print(output)
    return 0


def dump_command(args: argparse.Namespace) -> int:
    """Print a trace as JSON, one object a line, in the order of the file."""
    with _file_errors(args.file), args.file.open("rb") as file:
        reader = TraceReader(file, str(args.file))
        print(json.dumps({"record": "header", "version": VERSION, **reader.header}))
        for block in reader.blocks():
            for found in _objects(block):
                print(json.dumps(found))
        _warn(args.file, reader.torn_at)
    return 0


def summary_command(args: argparse.Namespace) -> int:
    """Print the counts, durations and waits of a trace."""
    numbers = summary(_read(args.file))
    print(json.dumps(numbers, indent=2) if args.json else "\n".join(_summary_lines(numbers)))
    return 0


def _read(path: Path) -> Trace:
    with _file_errors(path):
        trace = read_trace(path)
    _warn(path, trace.torn_at)
    return trace


def _warn(path: Path, torn_at: int | None) -> None:
    if torn_at is not None:
        print(f"symphony: {path} is torn at byte {torn_at:,}: what came before is shown", file=sys.stderr)


def _objects(block: Block) -> Iterator[dict[str, Any]]:
    """Yield the records of a block as JSON objects, with their details."""
    names, detail_names = block.records.dtype.names or (), block.details.dtype.names or ()
    details = block.details.tolist()
    end = 0
    for values in block.records.tolist():
        record = dict(zip(names, values, strict=True))
        found: dict[str, Any] = {"record": _NAMES[block.kind]}
        found |= {name: value for name, value in record.items() if name not in _PLACES}
        if block.kind is BlockKind.ARRIVALS:
            begin, end = end, end + record["num_accounts"]
            found["deadline_ns"] = None if record["deadline_ns"] == NO_DEADLINE else record["deadline_ns"]
            found["kind"] = _kind_name(record["kind"])
            found["accounts"] = [number for (number,) in details[begin:end]]
        elif block.kind is BlockKind.FILES:
            found["is_named"] = bool(record["is_named"])
        elif block.kind is BlockKind.STEPS:
            begin, end = end, end + record["num_calls"]
            found["predicted_ns"] = None if math.isnan(record["predicted_ns"]) else record["predicted_ns"]
            found["seats"] = [dict(zip(detail_names, seat, strict=True)) for seat in details[begin:end]]
        yield found


def _kind_name(number: int) -> str:
    return CallKind(number).word if number in set(CallKind) else str(number)


def summary(trace: Trace) -> dict[str, Any]:
    """Return counts and times of a trace.
    Times are in seconds, with the median and the 99th percentile of each kind.
    """
    began_ns, ended_ns = span_ns(trace)
    calls, steps = calls_of(trace), trace.steps
    step_s = (steps["ended_ns"] - steps["began_ns"]) * 1e-9
    has_prefill = steps["num_prefill_rows"] > 0
    known = calls.arrival != UNKNOWN
    kinds = np.zeros(len(calls), np.int64)
    kinds[known] = trace.arrivals["kind"][calls.arrival[known]]
    took_s = (calls.ended_ns - calls.arrived_ns) * 1e-9
    waited_s = np.maximum(0.0, took_s - calls.compute_ns * 1e-9)
    over = calls.is_over
    errors = np.abs(steps["predicted_ns"] * 1e-9 / np.maximum(step_s, 1e-9) - 1)
    programs = {(int(each["pid"]), int(each["uid"])) for each in trace.arrivals}
    return {
        "header": dict(trace.header),
        "seconds": (ended_ns - began_ns) * 1e-9,
        "num_lost": trace.num_lost,
        "is_torn": trace.torn_at is not None,
        "programs": len(programs),
        "steps": len(steps),
        "rows": int(steps["num_rows"].sum()),
        "prefill_rows": int(steps["num_prefill_rows"].sum()),
        "busy_share": float(step_s.sum() / max((ended_ns - began_ns) * 1e-9, 1e-9)),
        "decode_step_s": _spread(step_s[~has_prefill]),
        "prefill_step_s": _spread(step_s[has_prefill]),
        "prediction_error": _spread(errors[~np.isnan(errors)]),
        "calls": {
            _kind_name(int(kind)) if kind else "unknown": {
                "num": int((kinds == kind).sum()),
                "failed": int(((kinds == kind) & (calls.errno != 0)).sum()),
                "took_s": _spread(took_s[(kinds == kind) & over]),
                "waited_s": _spread(waited_s[(kinds == kind) & over]),
            }
            for kind in np.unique(kinds)
        },
        "think_s": _spread(_think_s(trace)),
    }


def _think_s(trace: Trace) -> Any:
    """Return think times in seconds: the gaps between a call and the next call of the same program on the same file.
    A call that arrived before the end of the previous call has no think time.
    """
    calls = calls_of(trace)
    some = np.flatnonzero(calls.arrival != UNKNOWN)
    if not len(some):
        return np.zeros(0)
    about = trace.arrivals[calls.arrival[some]]
    order = np.lexsort((calls.arrived_ns[some], about["file"], about["pid"]))
    some, about = some[order], about[order]
    is_same = (about["file"][1:] == about["file"][:-1]) & (about["pid"][1:] == about["pid"][:-1])
    gaps = calls.arrived_ns[some][1:] - calls.ended_ns[some][:-1]
    return gaps[is_same & (gaps >= 0)] * 1e-9


def _spread(values: Any) -> dict[str, Any]:
    if not len(values):
        return {"num": 0}
    middle, most = np.percentile(values, (50, 99)).tolist()
    return {"num": len(values), "median": middle, "p99": most}


def _summary_lines(numbers: Mapping[str, Any]) -> list[str]:
    header = numbers["header"]
    facts = [str(header[key]) for key in ("model", "backend", "precision", "processor") if key in header]
    lines = [
        f"of        {', '.join(facts)}",
        f"time      {numbers['seconds']:.3f} s, {100 * numbers['busy_share']:.0f} % of it in steps",
        f"steps     {numbers['steps']:,}: {numbers['rows']:,} rows, {numbers['prefill_rows']:,} of them of prefills",
        f"  decodes alone  {_times(numbers['decode_step_s'])}",
        f"  with prefills  {_times(numbers['prefill_step_s'])}",
    ]
    if numbers["prediction_error"]["num"]:
        error = numbers["prediction_error"]
        lines.append(f"  predicted within {100 * error['median']:.1f} % (median), {100 * error['p99']:.1f} % (p99)")
    lines.append(f"programs  {numbers['programs']:,}; thinking {_times(numbers['think_s'])}")
    for kind, each in numbers["calls"].items():
        lines.append(f"{kind:9} {each['num']:,} calls, {each['failed']:,} failed")
        lines += [f"  took           {_times(each['took_s'])}", f"  waited         {_times(each['waited_s'])}"]
    lines += [f"lost      {numbers['num_lost']:,} records"] if numbers["num_lost"] else []
    return lines


def _times(spread: Mapping[str, Any]) -> str:
    if not spread["num"]:
        return "none"
    return f"{1000 * spread['median']:.3f} ms (median), {1000 * spread['p99']:.3f} ms (p99), of {spread['num']:,}"
