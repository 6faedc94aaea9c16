"""Where the calls of a trace are drawn: a lane for each program, with rows in which no two bars overlap.

A file's calls stay in one row from the first to the last, so that the gaps between them are the program's think time. A
row that is free again is another file's. Calls that wait for each other in one file's queue need rows beside each
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from scheduler.trace.file import Trace
from symphony.trace_calls import UNKNOWN, Calls, Ints


@dataclass(frozen=True, slots=True)
class Lane:
    """One program."""

    pid: int
    """UNKNOWN: of the calls whose arrival is missing."""
    uid: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Who is drawn where."""

    lanes: list[Lane]
    order: Ints
    """The calls, row by row, each row's by time."""
    first: Ints
    """[rows + 1] where each row begins in `order`."""


def rows_of(trace: Trace, calls: Calls) -> Rows:
    """Give each call its row."""
    unknown = calls.arrival == UNKNOWN
    arrivals = trace.arrivals if len(trace.arrivals) else np.zeros(1, trace.arrivals.dtype)
    pid = np.where(unknown, UNKNOWN, arrivals["pid"][calls.arrival])
    uid = np.where(unknown, UNKNOWN, arrivals["uid"][calls.arrival].astype(np.int64))
    # Of an unknown call the number says as little as that of a file would.
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
    return Rows(lanes, np.concatenate(rows) if rows else np.zeros(0, np.int64), first)


def _layers(some: Ints, calls: Calls) -> list[Ints]:
    """Calls of one file, by time, in parts without an overlap: one, unless some wait for others."""
    if (calls.arrived_ns[some[1:]] >= calls.ended_ns[some[:-1]]).all():
        return [some]
    layers: list[list[int]] = []
    free: list[tuple[int, int]] = []  # when each layer is
    for call in some.tolist():
        if free and free[0][0] <= calls.arrived_ns[call]:
            layer = heappop(free)[1]
        else:
            layer = len(layers)
            layers.append([])
        layers[layer].append(call)
        heappush(free, (int(calls.ended_ns[call]), layer))
    return [np.array(layer) for layer in layers]


def _packed(units: list[Ints], calls: Calls) -> list[Ints]:
    """As few rows as the units need."""
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


def _begin(unit: Ints, calls: Calls) -> int:
    return int(calls.arrived_ns[unit[0]])
