"""Layout of a timeline: a lane for each program, with rows in which no two calls overlap.

The calls of a file stay in one row, so that the gaps between them show the program's think time. A row that is free
again is used for another file. Calls on one file that wait for each other overlap, so they need several rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from scheduler.trace.file import Trace
from symphony.traces.trace_calls import UNKNOWN, Ints, TracedCalls


@dataclass(frozen=True, slots=True)
class Lane:
    """Lane of a program: a range of rows."""

    pid: int
    """Pid of the program. UNKNOWN: the lane holds calls whose arrival is missing."""
    uid: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class TraceRows:
    """Rows of all calls, and the lanes of all programs."""

    lanes: list[Lane]
    order: Ints
    """Indices of calls, grouped by row, and sorted by time within a row."""
    first: Ints
    """[rows + 1]: index at which each row begins in `order`."""


def rows_of(trace: Trace, calls: TracedCalls) -> TraceRows:
    """Assign each call to a row."""
    unknown = calls.arrival == UNKNOWN
    arrivals = trace.arrivals if len(trace.arrivals) else np.zeros(1, trace.arrivals.dtype)
    pid = np.where(unknown, UNKNOWN, arrivals["pid"][calls.arrival])
    uid = np.where(unknown, UNKNOWN, arrivals["uid"][calls.arrival].astype(np.int64))
    # An unknown call lacks a file: the call's serial number serves instead.
    file = np.where(unknown, calls.number, arrivals["file"][calls.arrival])
    order = np.lexsort((calls.arrived_ns, file, uid, pid))
    keys = np.stack((pid, uid, file))[:, order]
    bounds = [0, *(np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1).tolist(), len(order)]
    units: dict[tuple[int, int], list[Ints]] = {}
    for begin, end in pairwise(bounds) if len(order) else ():
        some = order[begin:end]
        units.setdefault((int(pid[some[0]]), int(uid[some[0]])), []).extend(_layers(some, calls))
    lanes, rows = list[Lane](), list[Ints]()
    for (pid_, uid_), found in sorted(units.items(), key=lambda each: min(_begin(unit, calls) for unit in each[1])):
        packed = _packed(found, calls)
        lanes.append(Lane(pid_, uid_, len(rows), len(packed)))
        rows += packed
    first = np.cumsum([0, *map(len, rows)])
    return TraceRows(lanes, np.concatenate(rows) if rows else np.zeros(0, np.int64), first)


def _layers(some: Ints, calls: TracedCalls) -> list[Ints]:
    """Split the calls of a file into layers without overlaps. If its calls never overlap, there is one layer."""
    if (calls.arrived_ns[some[1:]] >= calls.ended_ns[some[:-1]]).all():
        return [some]
    layers: list[list[int]] = []
    free: list[tuple[int, int]] = []  # heap of (time at which a layer is free, layer)
    for call in some.tolist():
        if free and free[0][0] <= calls.arrived_ns[call]:
            layer = heappop(free)[1]
        else:
            layer = len(layers)
            layers.append([])
        layers[layer].append(call)
        heappush(free, (int(calls.ended_ns[call]), layer))
    return [np.array(layer) for layer in layers]


def _packed(units: list[Ints], calls: TracedCalls) -> list[Ints]:
    """Pack units into as few rows as possible. A unit is a layer of one file's calls."""
    rows: list[list[Ints]] = []
    free: list[tuple[int, int]] = []
    for unit in sorted(units, key=lambda unit: _begin(unit, calls)):
        if free and free[0][0] <= _begin(unit, calls):
            row = heappop(free)[1]
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(unit)
        heappush(free, (int(calls.ended_ns[unit[-1]]), row))
    return [np.concatenate(row) for row in rows]


def _begin(unit: Ints, calls: TracedCalls) -> int:
    return int(calls.arrived_ns[unit[0]])
