"""Conversion of a trace to Trace Event JSON, for viewers of timelines: Perfetto, chrome://tracing, speedscope.

Process 0 shows the steps, as slices and as a curve of their rows. Each program is a further process, whose threads are
the rows of `trace_rows`. A row has a slice for each call. Inner slices show when consecutive steps computed the call.
Calls of one decode loop that follow each other closely share a slice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.trace.file import Trace
from scheduler.trace.records import NO_DEADLINE, CallKind
from symphony.traces.trace_calls import UNKNOWN, Ints, TracedCalls, calls_of, recorded_ns, span_ns
from symphony.traces.trace_rows import TraceRows, rows_of

Event = dict[str, Any]
_NS_A_US = 1000


def text_of(trace: Trace, title: str) -> Iterator[str]:
    """Yield the text of the JSON file in pieces, with one event a line."""
    began_ns, _ = span_ns(trace)
    about = {
        "title": title,
        **trace.header,
        "recorded_us": _us(recorded_ns(trace, began_ns), began_ns),
        "num_lost": trace.num_lost,
        "is_torn": trace.torn_at is not None,
    }
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'
    separator = ""
    for event in events_of(trace):
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"


def events_of(trace: Trace) -> Iterator[Event]:
    """Yield the events of a trace. Times are in microseconds since the trace began."""
    began_ns, _ = span_ns(trace)
    yield _named(0, "steps")
    yield from _step_events(trace, began_ns)
    calls = calls_of(trace)
    rows = rows_of(trace, calls)
    for number, lane in enumerate(rows.lanes, 1):
        yield _named(number, "unknown" if lane.pid == UNKNOWN else f"program {lane.pid} of uid {lane.uid}")
    yield from _call_events(trace, calls, rows, began_ns)


def _named(process: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def _step_events(trace: Trace, began_ns: int) -> Iterator[Event]:
    steps = trace.steps
    columns = ("began_ns", "ended_ns", "predicted_ns", "num_rows", "num_prefill_rows", "num_calls", "num_entries")
    is_followed = _are_followed(trace).tolist()
    for follows, began, ended, predicted, num_rows, prefill, num_calls, entries in zip(
        is_followed, *(steps[name].tolist() for name in columns), strict=True
    ):
        at = {"pid": 0, "tid": 0, "ts": _us(began, began_ns)}
        about = {"rows": num_rows, "prefill_rows": prefill, "calls": num_calls, "entries": entries}
        if math.isfinite(predicted):
            about["predicted_us"] = round(predicted / _NS_A_US, 1)
        yield {"ph": "X", "name": "step", "dur": _us(max(ended, began), began), "args": about, **at}
        yield {"ph": "C", "name": "rows", "args": {"prefill": prefill, "decode": num_rows - prefill}, **at}
        if not follows:
            yield {"ph": "C", "name": "rows", "args": {"prefill": 0, "decode": 0}, **at, "ts": _us(ended, began_ns)}


def _are_followed(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return for each step whether the next step followed closely: within a quarter of the step's own time."""
    began, ended = trace.steps["began_ns"], trace.steps["ended_ns"]
    followed = np.zeros(len(began), np.bool_)
    followed[:-1] = began[1:] - ended[:-1] <= (ended - began)[:-1] // 4
    return followed


def _call_events(trace: Trace, calls: TracedCalls, rows: TraceRows, began_ns: int) -> Iterator[Event]:
    order = rows.order
    first = _first_of_slices(calls, rows)
    bounds = np.append(first, len(order)).tolist()
    row_of = (np.searchsorted(rows.first, first, side="right") - 1).tolist()
    lane_of = np.repeat(np.arange(1, len(rows.lanes) + 1), [lane.num_rows for lane in rows.lanes]).tolist()
    parts = _parts(trace, calls, order, first)
    step_began, step_ended = trace.steps["began_ns"], trace.steps["ended_ns"]
    for number, row in enumerate(row_of):
        some = order[bounds[number] : bounds[number + 1]]
        at = {"ph": "X", "pid": lane_of[row], "tid": row}
        begin, end = int(calls.arrived_ns[some[0]]), int(calls.ended_ns[some[-1]])
        about = _about(trace, calls, some)
        name = about.pop("kind")
        yield {**at, "name": name, "ts": _us(begin, began_ns), "dur": _us(end, begin), "args": about}
        for first_step, last_step in zip(*parts[number], strict=True):
            part = min(max(int(step_began[first_step]), begin), end)  # an answered call may be in one more step
            computed = _us(max(min(int(step_ended[last_step]), end), part), part)
            about = {"first_step": first_step, "steps": last_step - first_step + 1}
            yield {**at, "name": "computed", "ts": _us(part, began_ns), "dur": computed, "args": about}


def _about(trace: Trace, calls: TracedCalls, some: Ints) -> dict[str, Any]:
    """Return the facts of a slice. `some`: the calls of the slice, either a single call or similar calls of a loop."""
    about = {
        "kind": "call",
        "call": int(calls.number[some[0]]),
        "calls": len(some),
        "rows": int(calls.num_rows[some].sum()),
        "steps": int(calls.num_seats[some].sum()),
    }
    if errno := int(calls.errno[some[-1]]):
        about["errno"] = errno
    if not calls.is_over[some[-1]]:
        about["is_over"] = False
    if (place := int(calls.arrival[some[0]])) != UNKNOWN:
        arrival = trace.arrivals[place]
        kind = int(arrival["kind"])
        about["kind"] = CallKind(kind).word if kind in set(CallKind) else str(kind)
        about |= {name: int(arrival[column]) for name, column in _ARRIVAL.items()}
        if arrival["deadline_ns"] != NO_DEADLINE:
            about["deadline_us"] = _us(int(arrival["deadline_ns"]), int(arrival["ns"]))
    return about


_ARRIVAL = {"file": "file", "before": "num_before", "tokens": "num_tokens", "priority": "priority"}


def _first_of_slices(calls: TracedCalls, rows: TraceRows) -> Ints:
    """Return the index in `rows.order` at which each slice begins.
    Calls that a loop makes in close succession share a slice.
    """
    order = rows.order
    number, began, ended = calls.number[order], calls.arrived_ns[order], calls.ended_ns[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (number[1:] != number[:-1]) | (began[1:] - ended[:-1] > (ended - began)[:-1] // 4)
    is_first[rows.first[:-1][rows.first[:-1] < len(order)]] = True
    return np.flatnonzero(is_first)


def _parts(trace: Trace, calls: TracedCalls, order: Ints, first: Ints) -> list[tuple[list[int], list[int]]]:
    """Return the first and the last steps of each slice's parts. Steps in close succession make one part."""
    follows = np.roll(_are_followed(trace), 1)
    counts = calls.num_seats[order]
    begin = np.cumsum(counts) - counts
    seat = np.arange(counts.sum()) + np.repeat(calls.first_seat[order] - begin, counts)
    step = calls.step_of_seat[calls.seats[seat]]
    is_first: npt.NDArray[np.bool_] = np.ones(len(step), np.bool_)
    is_first[1:] = (step[1:] != step[:-1] + 1) | ~follows[step[1:]]
    of_slices = begin[first]
    is_first[of_slices[of_slices < len(step)]] = True
    starts = np.flatnonzero(is_first)
    last = step[np.append(starts[1:], len(step)) - 1] if len(starts) else starts
    bounds = np.searchsorted(starts, np.append(of_slices, len(step))).tolist()
    firsts, lasts = step[starts].tolist(), last.tolist()
    return [(firsts[begin:end], lasts[begin:end]) for begin, end in pairwise(bounds)]


def _us(ns: int, since_ns: int) -> float:
    return (ns - since_ns) / _NS_A_US
