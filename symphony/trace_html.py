"""A trace as one HTML page that needs nothing else: neither a network nor a library.

The page is `trace_page/page.html` with its style, its script and the trace in it. Numbers are columns, each deflated,
with the bytes that have the same place in their numbers together, and in base64: 64 decode loops over 100,000 steps are
15 MB. The script draws what is in sight, of long stretches a share for each pixel.
"""

from __future__ import annotations

import base64
import json
import zlib
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.trace.file import Trace
from scheduler.trace.records import NO_DEADLINE, CallKind
from symphony.trace_calls import UNKNOWN, Calls, Ints, calls_of, recorded_ns, span_ns
from symphony.trace_rows import Rows, rows_of

_NS_A_US = 1000
_DEFLATE_LEVEL = 3  # twice as fast as 6, and no larger by a tenth


def page(trace: Trace, title: str) -> str:
    """The whole page."""
    parts = files("symphony") / "trace_page"
    text = (parts / "page.html").read_text(encoding="utf-8")
    found = {
        "TITLE": _escaped(title),
        "STYLE": (parts / "page.css").read_text(encoding="utf-8"),
        "SCRIPT": (parts / "page.js").read_text(encoding="utf-8"),
        "DATA": json.dumps(page_data(trace, title)).replace("<", "\\u003c"),  # no text of a header ends the element
    }
    for name, value in found.items():
        text = text.replace(f"<!--{name}-->", value)
    return text


def page_data(trace: Trace, title: str) -> dict[str, Any]:
    """What the script is given; times are microseconds since the trace began."""
    began_ns, ended_ns = span_ns(trace)
    calls = calls_of(trace)
    rows = rows_of(trace, calls)
    return {
        "title": title,
        "header": dict(trace.header),
        "end_us": (ended_ns - began_ns) / _NS_A_US,
        "recorded_us": (recorded_ns(trace, began_ns) - began_ns) / _NS_A_US,
        "num_lost": trace.num_lost,
        "is_torn": trace.torn_at is not None,
        "lanes": [[lane.pid, lane.uid, lane.first_row, lane.num_rows] for lane in rows.lanes],
        "kinds": {int(kind): kind.word for kind in CallKind},
        "steps": _step_columns(trace, began_ns),
        "arrivals": _arrival_columns(trace, began_ns),
        "calls": _call_columns(trace, calls, rows, began_ns),
        "rows": {"first": _column(rows.first, "u4")},
    }


def _step_columns(trace: Trace, began_ns: int) -> dict[str, Any]:
    steps = trace.steps
    return {
        "began": _column(_us(steps["began_ns"], began_ns), "f8", is_delta=True),
        "took": _column(_us(steps["ended_ns"], began_ns) - _us(steps["began_ns"], began_ns), "f8"),
        "predicted": _column(steps["predicted_ns"] / _NS_A_US, "f4"),
        "rows": _column(steps["num_rows"], "u4"),
        "prefill": _column(steps["num_prefill_rows"], "u4"),
        "calls": _column(steps["num_calls"], "u4"),
        "entries": _column(steps["num_entries"], "f8"),
    }


def _arrival_columns(trace: Trace, began_ns: int) -> dict[str, Any]:
    arrivals = trace.arrivals
    deadline = np.where(arrivals["deadline_ns"] == NO_DEADLINE, np.nan, _us(arrivals["deadline_ns"], began_ns))
    return {
        "file": _column(arrivals["file"], "f8"),
        "before": _column(arrivals["num_before"], "u4"),
        "tokens": _column(arrivals["num_tokens"], "u4"),
        "kind": _column(arrivals["kind"], "u1"),
        "priority": _column(arrivals["priority"], "i1"),
        "deadline": _column(deadline, "f8"),
    }


def _call_columns(trace: Trace, calls: Calls, rows: Rows, began_ns: int) -> dict[str, Any]:
    """Row by row."""
    order = rows.order
    first_part, first_step, last_step = _parts(trace, calls, order)
    # Of a call with steps from the end of the last one on: most are over at once, and that deflates to nothing.
    rest = _us(calls.ended_ns[order], began_ns)
    has_steps = calls.num_seats[order] > 0
    step_end = _us(trace.steps["ended_ns"], began_ns)
    rest[has_steps] -= step_end[last_step[first_part[1:][has_steps] - 1]]
    return {
        "arrival": _column(np.where(calls.arrival[order] == UNKNOWN, 0, calls.arrival[order] + 1), "u4"),
        "number": _column(calls.number[order], "f8", is_delta=True),
        "began": _column(_us(calls.arrived_ns[order], began_ns), "f8", is_delta=True),
        "rest": _column(rest, "f8"),
        "over": _column(calls.is_over[order], "u1"),
        "errno": _column(calls.errno[order], "u2"),
        "rows": _column(calls.num_rows[order], "u4"),
        "steps": _column(calls.num_seats[order], "u4"),
        "part": _column(first_part, "u4", is_delta=True),
        "first_step": _column(first_step, "u4", is_delta=True),
        "last_step": _column(last_step - first_step, "u4"),
    }


def _parts(trace: Trace, calls: Calls, order: Ints) -> tuple[Ints, Ints, Ints]:
    """[calls + 1] where each call's parts begin; the first and the last step of each.

    A part is drawn as one bar: steps that follow each other within a quarter of what the one before took.
    """
    began, ended = trace.steps["began_ns"], trace.steps["ended_ns"]
    follows = np.zeros(len(began), np.bool_)
    follows[1:] = began[1:] - ended[:-1] <= (ended - began)[:-1] // 4
    counts = calls.num_seats[order]
    begin = np.cumsum(counts) - counts
    seat = np.arange(counts.sum()) + np.repeat(calls.first_seat[order] - begin, counts)
    step = calls.step_of_seat[calls.seats[seat]]
    is_first = np.ones(len(step), np.bool_)
    is_first[1:] = (step[1:] != step[:-1] + 1) | ~follows[step[1:]]
    is_first[begin[counts > 0]] = True
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(step)) - 1 if len(first) else first
    return np.searchsorted(first, np.append(begin, len(step))), step[first], step[last]


def _us(ns: Any, began_ns: int) -> npt.NDArray[np.float64]:
    """Whole microseconds: what comes of their differences is exact, and deflates well."""
    return np.asarray((ns - began_ns) // _NS_A_US, np.float64)


def _column(values: Any, kind: str, *, is_delta: bool = False) -> list[Any]:
    """[type, how many, whether each number is the difference from the one before (modulo its type), base64]."""
    numbers = np.asarray(values)
    if is_delta:
        numbers = np.diff(numbers, prepend=numbers.dtype.type(0))
    stored = np.ascontiguousarray(numbers.astype(f"<{kind}"))
    planes = stored.view(np.uint8).reshape(len(stored), stored.itemsize).T.tobytes()
    return [kind, len(stored), int(is_delta), base64.b64encode(zlib.compress(planes, _DEFLATE_LEVEL)).decode("ascii")]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
