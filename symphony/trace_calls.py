"""The calls of a trace, put together from its records: when each came, when it was computed, when it was over.

A decode loop that goes on in C has one number for all of its calls; what tells them apart is when each came. Where the
arrival is missing (it was lost, or the file is torn) nobody knows whose a call was: its program is `UNKNOWN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler.trace.file import Trace

Ints: TypeAlias = "npt.NDArray[np.int64]"

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Calls:
    """Columns, a place for each call, in no order; times are of the daemon's monotonic clock."""

    arrival: Ints
    """The place of its arrival in the trace, or UNKNOWN. Calls of one loop share it."""
    number: Ints
    arrived_ns: Ints
    ended_ns: Ints
    """Of a call that was not over when the trace ended: the end of the trace."""
    is_over: npt.NDArray[np.bool_]
    errno: Ints
    num_rows: Ints
    """That were computed for it."""
    compute_ns: Ints
    """Time of the steps that held some of it."""
    first_seat: Ints
    num_seats: Ints
    """Its places in `seats`: one for each of its steps, in order."""
    seats: Ints
    """Places of seats in the trace, call by call."""
    step_of_seat: Ints
    """By a seat's place in the trace."""

    def __len__(self) -> int:
        return len(self.number)


def span_ns(trace: Trace) -> tuple[int, int]:
    """When it begins and ends: calls that were under way began before the recording."""
    began = _clock_ns(trace)
    times = [trace.arrivals["ns"], trace.answers["ns"], trace.steps["began_ns"], trace.steps["ended_ns"]]
    found = np.concatenate([*times, trace.lost["ns"]])
    if isinstance(began, int):
        found = np.append(found, began)
    return (int(found.min()), int(found.max())) if len(found) else (0, 0)


def recorded_ns(trace: Trace, otherwise: int) -> int:
    """Since when steps were recorded."""
    began = _clock_ns(trace)
    return began if isinstance(began, int) else otherwise


def _clock_ns(trace: Trace) -> object:
    clock = trace.header.get("clock")
    return clock.get("monotonic_ns") if isinstance(clock, dict) else None


def calls_of(trace: Trace) -> Calls:
    """All that a trace says of calls."""
    seats, steps = trace.seats, trace.steps
    step_of_seat = np.repeat(np.arange(len(steps)), steps["num_calls"])
    order = np.lexsort((step_of_seat, seats["call"]))
    number, arrived = seats["call"][order], seats["arrived_ns"][order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (number[1:] != number[:-1]) | (arrived[1:] != arrived[:-1])
    first = np.flatnonzero(is_first)
    counts = np.diff(np.append(first, len(order)))
    step_ns = (steps["ended_ns"] - steps["began_ns"])[step_of_seat[order]]
    last_step = step_of_seat[order][first + counts - 1]

    # Calls that no step held, and then all of them.
    waiting = np.flatnonzero(~np.isin(trace.arrivals["call"], number))
    number = np.concatenate((number[first], trace.arrivals["call"][waiting]))
    arrived = np.concatenate((arrived[first], trace.arrivals["ns"][waiting]))
    computed_ns = np.concatenate((steps["ended_ns"][last_step], np.zeros(len(waiting), np.int64)))
    nothing = np.zeros(len(waiting), np.int64)
    # Of the calls with one number all but the last were answered right behind their steps.
    is_last = np.ones(len(number), np.bool_)
    is_last[: len(first)][:-1] = number[: len(first)][:-1] != number[: len(first)][1:]
    answer, has_answer = _places(trace.answers["call"], number)
    has_answer &= is_last
    end_ns = span_ns(trace)[1]
    ended = np.where(is_last, end_ns, computed_ns)
    ended[has_answer] = trace.answers["ns"][answer[has_answer]]
    errors = np.zeros(len(number), np.int64)
    errors[has_answer] = trace.answers["errno"][answer[has_answer]]
    arrival, is_known = _places(trace.arrivals["call"], number)
    return Calls(
        arrival=np.where(is_known, arrival, UNKNOWN),
        number=number,
        arrived_ns=np.minimum(arrived, ended),
        ended_ns=ended,
        is_over=~is_last | has_answer,
        errno=errors,
        num_rows=np.concatenate((_sums(seats["num_now"][order], first), nothing)),
        compute_ns=np.concatenate((_sums(step_ns, first), nothing)),
        first_seat=np.concatenate((first, nothing)),
        num_seats=np.concatenate((counts, nothing)),
        seats=order,
        step_of_seat=step_of_seat,
    )


def _places(numbers: Any, wanted: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Where in `numbers` each of `wanted` is, the last time it is there; and whether it is."""
    if not len(numbers):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
    order = np.argsort(numbers, kind="stable")
    place = np.searchsorted(numbers, wanted, side="right", sorter=order) - 1
    found = order[np.maximum(place, 0)]
    return found, numbers[found] == wanted


def _sums(values: Any, first: Ints) -> Ints:
    """Of each group that begins at one of `first`."""
    return np.add.reduceat(values.astype(np.int64), first) if len(first) else np.zeros(0, np.int64)
